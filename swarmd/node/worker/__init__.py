"""The daemon's end of its workers: their processes, and their share of the machine's time."""
