"""redraft: run time of the speculative-decoding service."""
