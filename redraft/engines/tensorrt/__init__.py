"""The backends `tensorrt` and `tensorrt_rtx`: serialized engines, caches in torch tensors."""
