"""A stand-in for the child that compiles schemas, which stumbles as the schema says: ``python -m`` runs it."""

from __future__ import annotations

import json
import os
import sys

from swarmd.client.text.child import limit

ROOM_BYTES = 64 * 2**20


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    limit(ROOM_BYTES)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        stumble = json.loads(json.loads(line)["schema"]).get("const")
        if stumble == "hang":
            while True:
                pass
        if stumble == "raise":
            raise RuntimeError("a library's own mistake")
        if stumble == "eat":
            print(len(bytearray(4 * ROOM_BYTES)), file=answers)
        print("{}", file=answers, flush=True)


if __name__ == "__main__":
    main()
