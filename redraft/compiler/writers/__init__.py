"""Writers of a bundle's networks, one module for each kind of backend; `redraft.bundle.backends` names them.

A writer imports what only its backend needs: `torch` bundles are built on machines without ONNX.
"""
