"""Schemas of strangers: whatever the library that compiles them does, it costs their sender's request and no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio
import trio.testing
from tokenizers import Tokenizer

from swarmd.gateway.generation import schema_trials as module
from swarmd.gateway.generation.json_schema import BadSchema, schema_of_calls
from swarmd.gateway.generation.schema_trials import Grammars
from swarmd.gateway.generation.turns import QueueFull
from swarmd.home.models import bundled_folder
from tests.gateway.vocabularies import spm, unigram, word_piece

pytestmark = pytest.mark.slow
STAND_IN = "tests.gateway.stumbling"
MOST_S = 0.5
COLOUR = {"enum": ["red", "blue"]}


def stumbling(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, bundled_folder() / "tokenizer.json", tokenizer.get_vocab_size(), 0, STAND_IN)


@pytest.mark.parametrize(
    ("stumble", "reason"), [("hang", "took more than"), ("raise", "ended"), ("eat", "out of memory")]
)
async def test_a_schema_at_which_the_library_stumbles_is_refused_and_the_next_one_is_not(
    tokenizer: Tokenizer, stumble: str, reason: str
) -> None:
    async with stumbling(tokenizer) as grammars:
        with pytest.raises(BadSchema, match=reason):
            await grammars.of_schema({"const": stumble}, "a", MOST_S)
        assert await grammars.of_schema(COLOUR, "a")


async def test_one_key_holds_one_child_and_the_others_go_on(tokenizer: Tokenizer) -> None:
    async with stumbling(tokenizer) as grammars, trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(grammars.of_schema, {"const": "hang", "title": str(number)}, "greedy", 600.0)
        await trio.testing.wait_all_tasks_blocked()
        assert await grammars.of_schema(COLOUR, "modest")
        nursery.cancel_scope.cancel()


async def test_who_goes_away_takes_the_child_along(tokenizer: Tokenizer) -> None:
    other_children = set(psutil.Process().children())
    async with stumbling(tokenizer) as grammars:
        await grammars.of_schema(COLOUR, "a")
        children = set(psutil.Process().children()) - other_children
        with trio.move_on_after(MOST_S) as scope:
            await grammars.of_schema({"const": "hang"}, "a", 600.0)
        assert scope.cancelled_caught
        assert not children & set(psutil.Process().children()), "its child has ended"
        assert await grammars.of_schema({"enum": [1]}, "a")


async def test_a_key_has_so_many_schemas_waiting(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING_OF_KEY", 1)
    async with stumbling(tokenizer) as grammars, trio.open_nursery() as nursery:
        nursery.start_soon(grammars.of_schema, {"const": "hang"}, "greedy", 600.0)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(QueueFull, match="of this key wait"):
            await grammars.of_schema(COLOUR, "greedy")
        nursery.cancel_scope.cancel()


async def test_what_was_found_is_remembered(tokenizer: Tokenizer) -> None:
    async with stumbling(tokenizer) as grammars:
        await grammars.of_schema(COLOUR)
    assert await grammars.of_schema(COLOUR), "no child is started again"


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "nonsense"}, "nonsense"),
        ({"$ref": "http://example.com/x"}, "example.com"),
        ({"type": "string", "pattern": "("}, "."),
        ({"enum": ["x" * 100_000]}, "at most"),
        ({"type": "object", "not": {"type": "string"}}, 'it says "not", which cannot be kept here: leave it out'),
    ],
)
async def test_a_schema_that_cannot_be_is_refused_in_words(
    tokenizer: Tokenizer, schema: dict[str, object], why: str
) -> None:
    async with Grammars(tokenizer, bundled_folder() / "tokenizer.json", 1024, 0) as grammars:
        with pytest.raises(BadSchema, match=why):
            await grammars.of_schema(schema)


# --- vocabularies of other kinds -----------------------------------------------------------------------------------


def written(grammar: Any, tokenizer: Tokenizer) -> str:
    """The first answer that fits, by a model that always says the largest token that may be."""
    tokens: list[int] = []
    while not grammar.is_done:
        for token in grammar.forced_tokens() or [int(grammar.allowed_tokens().nonzero()[-1])]:
            tokens.append(token)
            grammar.accept_token(token, "")
    return str(tokenizer.decode(tokens))


@pytest.fixture(params=[spm, unigram])
def foreign(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Tokenizer, Path]:
    made = request.param()
    made.save(str(tmp_path / "tokenizer.json"))
    return made, tmp_path / "tokenizer.json"


async def test_vocabularies_that_are_not_byte_level_keep_schemas(foreign: tuple[Tokenizer, Path]) -> None:
    tokenizer, path = foreign
    async with Grammars(tokenizer, path, tokenizer.get_vocab_size(), 0) as grammars:
        assert json.loads(written(await grammars.of_schema(COLOUR), tokenizer)) in COLOUR["enum"]


async def test_a_tokenizer_may_have_more_tokens_than_its_model(tokenizer: Tokenizer) -> None:
    n = tokenizer.get_vocab_size() - 100
    async with Grammars(tokenizer, bundled_folder() / "tokenizer.json", n, 0) as grammars:
        grammar = await grammars.of_schema(COLOUR)
        assert len(grammar.allowed_tokens()) == n
        assert json.loads(written(grammar, tokenizer)) in COLOUR["enum"]


async def test_a_vocabulary_that_writes_spaces_by_itself_is_refused_in_words(tmp_path: Path) -> None:
    made = word_piece()
    made.save(str(tmp_path / "tokenizer.json"))
    async with Grammars(made, tmp_path / "tokenizer.json", 3, 0) as grammars:
        with pytest.raises(BadSchema, match="tokenizer \\(WordPiece\\) does not write its tokens one by one"):
            await grammars.of_schema(COLOUR)


async def test_forced_calls_keep_what_their_schemas_refer_to(tokenizer: Tokenizer) -> None:
    place = {"type": "object", "properties": {"at": {"$ref": "#/$defs/P"}}, "required": ["at"], "$defs": {"P": COLOUR}}
    chain = {
        "type": "object",
        "properties": {"v": {"enum": ["x"]}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
        "required": ["v", "next"],
    }
    async with Grammars(tokenizer, bundled_folder() / "tokenizer.json", 1024, 0) as grammars:
        for schema, right in ((place, {"at"}), (chain, {"v", "next"})):
            tool = {"type": "function", "function": {"name": "go", "parameters": schema}}
            call = json.loads(
                written(await grammars.of_schema(schema_of_calls([tool], allows_several=False)), tokenizer)
            )
            while call["arguments"] is not None:
                assert set(call["arguments"]) == right, "a reference to # is the tool's own schema"
                call["arguments"] = call["arguments"].get("next")
