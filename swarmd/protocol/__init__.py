"""What peers say to each other: bytes to values and back, without I/O, clocks or torch."""
