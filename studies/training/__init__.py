"""Figures of drafters' training."""
