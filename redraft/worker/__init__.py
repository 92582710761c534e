"""The engine worker: the process that owns an engine, its protocol and its client."""
