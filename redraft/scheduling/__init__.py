"""In-flight batching: which requests run, and how the rows of a step are shared among them."""
