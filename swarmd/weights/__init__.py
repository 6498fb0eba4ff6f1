"""Models as verified bytes: on disk, to others, and from others."""
