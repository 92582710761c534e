"""Load tests of a running service."""
