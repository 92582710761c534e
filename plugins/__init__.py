"""Custom operators: specification, reference and kernels; see README.md."""
