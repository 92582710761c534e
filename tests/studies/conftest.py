"""The small tokenizer folder of the benchmarks."""

from tests.benchmarks.conftest import tokenizer_folder

__all__ = ["tokenizer_folder"]
