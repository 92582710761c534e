"""Answers with a structure: formats that a request asks for, and calls of tools."""
