"""Drafters judged on recorded answers of the target."""
