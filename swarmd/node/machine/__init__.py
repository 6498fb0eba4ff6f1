"""This machine: its models, its owner's rules, its health, and the doors for its owner."""
