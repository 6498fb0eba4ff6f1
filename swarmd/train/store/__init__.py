"""What a member keeps of a run: the ledger and the anchors' signatures, states, data, and who else is there."""
