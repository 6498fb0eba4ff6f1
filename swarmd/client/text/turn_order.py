"""Turns of a conversation in the order that its model's chat template takes.

Programs put a system's notes anywhere, and send two turns of a user's in a row. Some templates refuse the first, some
the second, some have no system's turn at all. Which, is found out by trying (``chat_template``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

Turn = dict[str, Any]
BETWEEN = "\n\n"  # texts that become one turn


class TurnRules(NamedTuple):
    """What a template takes: a system's turn at the beginning, later ones, two of a user's or an assistant's in a row.

    ``takes_talk``: a user's turn right behind a tool's result.
    """

    takes_system: bool = True
    takes_notes: bool = True
    takes_runs: bool = True
    takes_talk: bool = True


# What a template does not take is written by the user, who is the only other one that a model listens to:
#
#     system system user ...       -->  system user ...         several at the beginning are one
#     system user ...              -->  user ...                it stands before what the user says
#     ... user system assistant    -->  ... user assistant      a note stands behind what the user said
#     ... tool system assistant    -->  ... tool user assistant   or is a turn of its own
#     ... user user assistant      -->  ... user assistant          the same of an assistant's
#     ... tool user assistant      -->  ... tool assistant          it stands behind the result
#
# Turns whose content is no text stay as they are: only the library's own users send such, and they know their template.
def order_turns(messages: Sequence[Turn], rules: TurnRules) -> list[Turn]:
    """Return the turns, those that a template refuses joined to others."""
    turns: list[Turn] = []
    for message in messages:
        is_leading = all(turn["role"] == "system" for turn in turns)
        is_folded = message["role"] == "system" and not is_leading and not rules.takes_notes
        turn = {**message, "role": "user"} if is_folded else dict(message)
        if turns and _join_roles(turns[-1], turn, is_leading, is_folded, rules):
            turns[-1] = _join(turns[-1], turn)
        else:
            turns.append(turn)
    if rules.takes_system or not turns or turns[0]["role"] != "system":
        return turns
    system, *others = turns
    as_user = {**system, "role": "user"}
    if others and others[0]["role"] == "user" and _are_texts(as_user, others[0]):
        return [_join(as_user, others[0]), *others[1:]]
    return [as_user, *others]


def _join_roles(before: Turn, turn: Turn, is_leading: bool, is_folded: bool, rules: TurnRules) -> bool:
    """Do these two turns, which follow each other, become one?"""
    if before["role"] == "tool" and turn["role"] == "user":
        return not rules.takes_talk and _are_texts(before, turn)
    if before["role"] != turn["role"] or not _are_texts(before, turn):
        return False
    if turn["role"] == "system":
        return is_leading
    if turn["role"] == "assistant":
        return not rules.takes_runs and "tool_calls" not in before
    return turn["role"] == "user" and (is_folded or not rules.takes_runs)


def _are_texts(before: Turn, turn: Turn) -> bool:
    return isinstance(before.get("content"), str) and isinstance(turn.get("content"), str)


def _join(before: Turn, turn: Turn) -> Turn:
    content = BETWEEN.join(text for text in (before["content"], turn["content"]) if text)
    return {**turn, **before, "content": content}
