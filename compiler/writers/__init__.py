"""Writers of a bundle's networks, one module for each kind of backend.

A writer imports what only its backend needs: `torch` bundles are built on machines without ONNX.
"""

WRITERS = {
    "openvino": "compiler.writers.openvino:write",
    "torch": "compiler.writers.torch:write",
    "tensorrt": "compiler.writers.tensorrt:write",
    "tensorrt_rtx": "compiler.writers.tensorrt:write",
}
"""The writer of each backend's bundles."""
