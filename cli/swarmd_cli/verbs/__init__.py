"""The verbs of the ``swarmd`` command, a module each."""
