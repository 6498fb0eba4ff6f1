"""Decisions on behalf of this machine's owner: when it works, how much, and whether it is well."""
