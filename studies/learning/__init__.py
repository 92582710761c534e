"""Whether drafts get better where a service has learned from what it serves."""
