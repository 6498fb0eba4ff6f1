"""Teams: members that compute one hop together, each a slice of every block."""
