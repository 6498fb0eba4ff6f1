#!/usr/bin/env bash
# tomlkit 0.15.2: a file that is only read and written again can have its tables in another order, and its comments where
# they mean something else.
#
# Guess: "style-preserving" means that dumps(parse(text)) is text, for every valid TOML file; and that a new key adds one line.
# Seen (2026-11-27): where another table stands between two tables [[serve]], the second is moved up beside the first. The
# comment above the table in between stays where it was, and so stands above the wrong table. And the first key that is set
# in [policy], where there was only [policy.night]  # a comment, gives [policy] a copy of that comment. What the file means
# is the same each time, so a check that reads both files and compares does not see it: compare dumps(parse(text)) with text.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check tomlkit==0.15.2
"$folder/venv/bin/python" - <<'PYTHON'
import tomllib

import tomlkit

APART = """[[serve]]
model = "large"
# these are the rules
[policy]
hours = "sat"
# this one only at night
[[serve]]
model = "small"
"""
again = tomlkit.dumps(tomlkit.parse(APART))
print(again)
assert tomllib.loads(again) == tomllib.loads(APART)
assert again != APART, "that has changed: tables stay where they are"

document = tomlkit.parse("[policy.night]  # when all sleep\nshare = 1.0\n")
document["policy"]["hours"] = "sat"
print(tomlkit.dumps(document))
assert tomlkit.dumps(document).count("# when all sleep") == 2, "that has changed: a comment stays one"
PYTHON
