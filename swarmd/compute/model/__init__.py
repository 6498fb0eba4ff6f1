"""A model in parts: a hollow skeleton with some of its blocks, its two ends, its vocabulary."""
