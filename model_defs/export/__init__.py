"""Networks of the target and of drafting loops: ONNX graphs and exported programs."""
