"""Training a stage of a model that no member holds: passes of micro-batches, who drives them, what is kept of them."""
