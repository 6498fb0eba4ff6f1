"""Decisions about models that are served: who holds which blocks, which chain is taken, what is computed next."""
