"""Chat templates as programs: they run in a process of their own, which may die."""
