"""The target: configuration, layers, shards."""
