"""Gradients of a run: where they come from, and how those of others are checked."""
