"""Drafting measured by its parts."""
