"""What sessions keep between passes: keys and values, states, adapters; and how they are handed over."""
