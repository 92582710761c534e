"""The draft models, one file per kind."""
