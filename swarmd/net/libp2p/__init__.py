"""The only folder that knows py-libp2p; each fault of the table in shared facts is handled here, once."""
