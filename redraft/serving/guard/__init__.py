"""The guard: a process in front of Triton's HTTP and gRPC ports that passes on only what Triton can bear."""
