"""Speed of engines and methods in one process."""
