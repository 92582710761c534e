"""SiLU of a half times the other half: see README.md."""
