"""GPU parts of the torch and TensorRT backends: CUDA graphs, sampling, transfers."""
