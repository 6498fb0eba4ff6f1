"""One pass over new tokens of several sessions, by the fastest backend that gives what the family gives."""
