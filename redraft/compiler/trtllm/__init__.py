"""TensorRT-LLM's checkpoint format."""
