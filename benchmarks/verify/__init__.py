"""Checks that speculation changes no output."""
