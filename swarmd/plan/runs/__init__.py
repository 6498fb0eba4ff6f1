"""Decisions of a training run: rounds, reducers, the ledger, and disputes."""
