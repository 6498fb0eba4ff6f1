"""Answers as they grow: rows of requests that share a head, sampling, grammars, text out of tokens."""
