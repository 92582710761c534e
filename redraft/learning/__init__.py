"""Drafters that learn from what they serve: the answers that are stored, and what was trained on them."""
