"""Tuning: the fit of the scores of drafted nodes to a bundle's own model."""
