"""How wide this CPU's registers are, as numbers that compiled code takes as constants."""

from __future__ import annotations

from swarmd.compute.hardware.packing import rows_together

ROWS = rows_together()  # of 4 bits; other packings give other results, which the comparison at load notices
WIDTH = ROWS // 4  # numbers of 32 bits in a register
