"""Structured output: what an answer may go on with, by a grammar, on every path of a draft tree."""
