"""What a member keeps of a run, on disk and from its peers: ledger, states, data, who else is there."""
