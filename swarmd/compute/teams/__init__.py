"""Teams: slices of blocks that are computed apart, and added up."""
