"""Budgets put to the test: mixes of requests served by budgets that choose themselves, live and on a virtual clock."""
