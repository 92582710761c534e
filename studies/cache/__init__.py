"""What the KV cache keeps for later requests."""
