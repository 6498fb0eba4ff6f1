"""The trio services of a daemon. They look, decide with plan/, and act."""
