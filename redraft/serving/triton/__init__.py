"""The code of the Triton models, which run inside Triton's Python backend."""
