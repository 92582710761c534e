"""Serving: the supervisor that owns the engine worker and the Triton server, and the code of the Triton models."""
