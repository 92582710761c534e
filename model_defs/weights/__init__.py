"""Weights as model folders and checkpoints hold them, read by Hugging Face's names."""
