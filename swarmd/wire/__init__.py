"""Tensors as they travel and as they are kept for replay: used by clients and workers alike, without a network."""
