"""Which blocks machines should hold for the links between them: one stream's trip, and the sum of all streams."""
