"""What developers run: pages that are made from data, and proofs that take longer than tests."""
