"""One folder per operator: specification, reference and kernels."""
