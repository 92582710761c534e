"""What the worker generates as each endpoint's answer, whole or as a stream."""
