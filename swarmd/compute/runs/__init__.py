"""The worker that trains: gradients of whole models, and steps of their optimizers."""
