"""Rows times a matrix, both in E4M3: see README.md."""
