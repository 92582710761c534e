"""Clients of a service: one interface, and a class for each protocol."""
