"""Decisions about connections: which addresses are dialled when, what is downloaded from whom."""
