"""A round: who leads and joins it, who adds up what, and how its outcome is agreed upon."""
