"""One pass over new tokens of several sessions, by the fastest backend whose results are the model family's own."""
