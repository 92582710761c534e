"""Teacher data and the training of drafters."""
