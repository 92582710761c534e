"""Errors that parts with few dependencies raise too."""


class BundleError(RuntimeError):
    """A bundle that cannot be loaded; the message says why and what to rebuild."""
