"""Draft tokens: who proposes them, which are tried, and when."""
