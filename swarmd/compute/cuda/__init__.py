"""What only CUDA devices take: written in Triton, which torch brings along, or recorded as CUDA graphs."""
