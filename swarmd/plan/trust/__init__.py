"""Decisions about whom to believe: audits, what counts as equal, reputation, who may enter."""
