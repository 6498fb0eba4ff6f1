"""What of a request is left out, since nothing here does it: told to the client, and no reason to refuse the rest.

Agents send what the newest servers can do, and go on without it. So fields, tools and items that are not known here are
skipped; a header of the answer names them, and the answer itself where its form has room for a field of ours.
"""

from __future__ import annotations

from typing import Any

from swarmd.printable import clean_line

HEADER = "x-swarmd-skipped"
MOST_TOLD = 16  # of what one request holds; the rest is counted
MOST_LETTERS = 80  # of one of them
NOTES = {
    **dict.fromkeys(("image", "image_url", "input_image"), "an image"),
    **dict.fromkeys(("document", "file", "input_file"), "a file"),
    **dict.fromkeys(("audio", "input_audio"), "a sound"),
}
"""What parts of a message are called in the note that stands for them."""


class Skipped:
    """Collects what is left out of one request."""

    def __init__(self) -> None:
        self._told: dict[str, None] = {}
        self._n_more = 0

    def add(self, what: str) -> None:
        """Note something that is left out; the same once."""
        shown = clean_line(what)[:MOST_LETTERS]
        if shown in self._told:
            return
        if len(self._told) < MOST_TOLD:
            self._told[shown] = None
        else:
            self._n_more += 1

    @property
    def told(self) -> tuple[str, ...]:
        """What is said to the client."""
        more = (f"and {self._n_more} more",) if self._n_more else ()
        return (*self._told, *more)

    @property
    def headers(self) -> dict[str, str]:
        """The header of the answer; none where nothing is left out."""
        if not self._told:
            return {}
        return {HEADER: ", ".join(self.told).encode("ascii", "replace").decode()}


def note_part(part: Any) -> str:
    """Return what stands in a result's text for a part that is no text."""
    kind = str(part.get("type")) if isinstance(part, dict) else "something"
    if kind == "tool_reference":
        return f"[the tool {str(part.get('tool_name', ''))[:128]} can be called now]"
    return f"[{NOTES.get(kind, kind[:32])}, which this model cannot see]"
