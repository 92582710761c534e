"""Runs of operators as one node."""

CONSTANTS = "program.constants"
"""The network input that holds the constants of all programs."""

ALIGNMENT = 64
"""Bytes to which every constant is aligned."""
