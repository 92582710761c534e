"""A head's most likely tokens and their log-probabilities: see README.md."""
