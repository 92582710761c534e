"""Draws of one level of a random draft tree."""

RULES = ("gumbel_top_k", "stochastic_beam", "independent")
"""How children are drawn, in the order of the kernel's numbers."""
