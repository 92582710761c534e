"""A residual's sum and its RMS norm: see README.md."""
