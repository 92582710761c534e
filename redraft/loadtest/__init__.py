"""The load test of a running service."""
