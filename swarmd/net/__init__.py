"""Network without torch: one API, two implementations (libp2p and simulated), and rpc on top of either."""
