"""What this machine computes with: its device, matrix unit and threads, and what was measured of them before."""
