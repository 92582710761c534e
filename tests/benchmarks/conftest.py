"""Fixtures of the load test."""

from tests.loadtest.stand_in import fake_client, tokenizer_folder

__all__ = ["fake_client", "tokenizer_folder"]
