"""docs/openapi.json: the control API, from the structs of its answers.

python -m tools.openapi      writes it anew; tests/node/machine/test_control.py holds the file to the source
"""

from __future__ import annotations

import json
from pathlib import Path

from swarmd.node.machine.control import openapi

FILE = Path(__file__).parent.parent / "docs" / "openapi.json"


def text() -> str:
    """The whole file."""
    return json.dumps(openapi(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
