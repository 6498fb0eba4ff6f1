"""Pure decisions: no trio, no torch, no libp2p, no clock, no randomness of its own."""
