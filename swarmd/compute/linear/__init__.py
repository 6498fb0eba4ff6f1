"""Linear layers that only compute: formats of their weights, and the kernels that multiply by them."""
