"""Readers of drafters that other projects trained, from the hub: one module for each form, listed in `readers`."""
