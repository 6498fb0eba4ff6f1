"""``swarmd run`` through a gateway: what is printed, and what is asked again."""

from __future__ import annotations

from typing import Any

import pytest
from swarmd_cli import gateway_client
from swarmd_cli.verbs.generate import CHAT, COMPLETIONS, _ask_gateway, _choose_path, _retry_until_whole, end_options

from swarmd.errors import ConfigError, NoRoute, SwarmUnavailable
from tests.cli.played import PlayedGateway

ABOUT = {
    "chain": ["[0,6) on abc"],
    "repairs": [],
    "longest_stall_s": 0.0,
    "doubts": [{"token": 1, "hop": "[0,6) on abc", "reason": "it lied"}],
}
LAST = {"choices": [], "usage": {"completion_tokens": 2}, "swarmd": ABOUT}


CHATS: dict[str, bool | None] = {"talks": True, "continues": False, "unread": None}


def delta(**event: str) -> dict[str, Any]:
    return {"choices": [{"delta": event}]}


def test_what_comes_is_printed_with_its_doubts(capsys: pytest.CaptureFixture[str]) -> None:
    events = [delta(role="assistant", content=""), delta(reasoning_content="hm, "), delta(content="yes"), delta(), LAST]
    _ask_gateway(PlayedGateway(CHATS, *events), CHAT, "m", "?", {})
    usage = capsys.readouterr()
    assert usage.out == "hm, yes\n"
    assert "2 tokens, " in usage.err
    assert "from token 2 of the answer on the text may be wrong: [0,6) on abc: it lied" in usage.err
    _ask_gateway(
        PlayedGateway(CHATS, {"choices": [{"text": "Once"}]}, {"choices": [{"text": " more"}]}, LAST),
        COMPLETIONS,
        "m",
        "Once",
        {},
    )
    assert capsys.readouterr().out == "Once more\n"


def test_what_was_begun_is_not_said_again() -> None:
    missing = NoRoute("no live server holds blocks [0,6) of 6")
    with pytest.raises(NoRoute):
        _ask_gateway(PlayedGateway(CHATS, missing), CHAT, "m", "?", {})
    with pytest.raises(SwarmUnavailable) as caught:
        _ask_gateway(PlayedGateway(CHATS, delta(content="ye"), missing), CHAT, "m", "?", {})
    assert not isinstance(caught.value, NoRoute)


def test_it_waits_for_missing_blocks_only_if_it_is_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmd_cli.verbs.generate.WAIT_S", 0.0)
    answers: list[Any] = [NoRoute("not yet"), NoRoute("not yet"), "here"]

    def ask() -> str:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return str(answer)

    assert _retry_until_whole(ask, waits=True) == "here"
    answers += [NoRoute("not yet")]
    with pytest.raises(NoRoute):
        _retry_until_whole(ask, waits=False)


def test_a_model_made_for_chat_is_asked_and_any_other_continues() -> None:
    gateway = PlayedGateway(CHATS)
    assert _choose_path(gateway, "talks", raw=False) == CHAT
    assert _choose_path(gateway, "talks", raw=True) == COMPLETIONS
    assert _choose_path(gateway, "continues", raw=False) == COMPLETIONS
    assert _choose_path(gateway, "unread", raw=False) is None, "what it was made for is seen in its files"
    assert _choose_path(gateway, "a" * 64, raw=False) is None, "by its hash"
    with pytest.raises(ConfigError, match="no model 'smole'; it has: talks, continues, unread"):
        _choose_path(gateway, "smole", raw=False)


@pytest.mark.parametrize(
    ("refusal", "kind", "exit_code"),
    [
        ({"message": "m", "type": "server_error", "code": "model_incomplete"}, NoRoute, 5),
        ({"message": "m", "type": "invalid_request_error", "code": None}, ConfigError, 2),
        ({"message": "m", "type": "server_error", "code": "swarm_unavailable"}, SwarmUnavailable, 75),
    ],
)
def test_refusals_of_a_gateway_are_errors_as_its_own_client_raises_them(
    refusal: dict[str, Any], kind: type[Exception], exit_code: int
) -> None:
    error = gateway_client._error_of_refusal(refusal)
    assert type(error) is kind
    assert getattr(error, "exit_code", 0) == exit_code


@pytest.mark.parametrize(
    ("author", "tokenizer", "template", "ends"),
    [
        (2, None, frozenset(), {"eos_token_id": [2]}),
        ([2, 7], 2, frozenset({3}), {"eos_token_id": [2, 3, 7]}),
        (None, None, frozenset(), {}),
    ],
)
def test_an_answer_ends_at_every_end_that_is_named(
    author: Any, tokenizer: int | None, template: frozenset[int], ends: dict[str, list[int]]
) -> None:
    assert end_options(author, tokenizer, template) == ends
