"""Torch without network: a family of models as a span of blocks, sessions, and the worker that runs them."""
