"""Vectors of a run: parameters, sums, and the codecs in which they travel."""
