"""Tensor parallelism: one process per shard of the target."""
