"""Messages of the models by which clients, and the guard, tell errors apart."""

from __future__ import annotations

INTERNAL_ERROR = "internal error: the Triton server's log has the cause"
QUEUE_FULL = "Exceeds maximum queue size. Maximum queue size of the service reached"
"""What TensorRT-LLM's clients look for, over gRPC and over HTTP."""
TIMED_OUT = "Request timeout expired"
