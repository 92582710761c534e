"""RSD's experiments."""
