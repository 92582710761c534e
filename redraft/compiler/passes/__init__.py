"""Passes over ONNX graphs: lowering, fusing, quantization, TensorRT forms."""
