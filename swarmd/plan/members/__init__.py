"""Which members are known, and how two of them come to know the same."""
