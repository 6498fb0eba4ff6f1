"""The only folder that knows py-libp2p; each fault of the table in docs/libp2p-faults.md is handled here, once."""

import logging

import libp2p

# Importing the library installs handlers of its own, and it reports every refused dial as an error. What matters of
# that is raised as a PeerError here and said by whoever acts on it.
_library = logging.getLogger(libp2p.__name__)
_library.handlers = [logging.NullHandler()]
_library.propagate = False
