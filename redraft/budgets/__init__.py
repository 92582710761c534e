"""Budgets: how many draft nodes a step verifies, from running estimates of its cost and its gain.

`cost` predicts the seconds of a step, `gain` corrects the chances of nodes by what was accepted, `choice` weighs the
two, `controller` asks them at each step and keeps a ledger of what drafting lost. `learned` is their file.
"""
