"""Checkpoints of every format, rewritten as one folder of bfloat16 safetensors with tokenizer and chat template."""
