"""Clients of a service, one class for each protocol, behind one interface."""
