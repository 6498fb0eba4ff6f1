"""Draft tokens: who proposes them, which are tried and when, and how a draft learns."""
