"""Checkpoints before they are published: can they be served, and GGUF files made safetensors."""
