"""Fine-tuning through the swarm: lanes, micro-batches, and their audits."""
