"""Serving: the supervisor that owns the engine worker and the Triton server; `triton` is the code of its models."""
