"""Proofs on real processes that take longer than tests: faults, training, trust, honesty, sieges."""
