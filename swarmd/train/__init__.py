"""Training together: what daemons and the library's own loops share. No torch here but in ``collaboration``."""
