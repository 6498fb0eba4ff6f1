"""What members sign about work: usage receipts, receipts of hops, and evidence against one."""
