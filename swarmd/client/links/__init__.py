"""What a client's sessions and lanes share: links to hops, ops, its own parameters, timing."""
