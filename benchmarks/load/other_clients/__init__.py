"""Clients that others wrote, run unchanged against `/v1`."""
