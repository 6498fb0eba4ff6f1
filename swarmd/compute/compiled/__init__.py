"""A decode step in machine code, compiled where it runs: all blocks of a span for a few new tokens, in one kernel."""
