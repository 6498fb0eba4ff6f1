"""Training runs as data: recipes, commits, and what backs a commit."""
