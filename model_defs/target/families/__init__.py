"""The families of target models: one module for each, listed in `registry`."""
