"""Members that hold all of the blocks share long prompts: what comes of it is what one process gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.passes.span import LoadedSpan
from swarmd.compute.serving.engine import LoadedEngine, LoadSignals
from swarmd.compute.serving.engines import load_engine
from swarmd.compute.teams.whole_span import LEAST_ROWS, WholeSpan
from swarmd.protocol.wire.worker import LoadSpan
from swarmd.values import Span
from tests import checkpoints
from tests.compute.teams.far_team import FarFollower
from tests.families import operations_error

SIGNALS = LoadSignals(lambda: None, lambda stage, done, total: None)
WIDTH = 64


def load(
    folder: Path, n_others: int, far: Callable[[LoadSpan, int], list[FarFollower]]
) -> tuple[LoadedEngine, list[FarFollower]]:
    own = LoadSpan(path=str(folder), model="m", start=0, end=2, threads=1, spill_folder=str(folder.parent))
    others = far(own, n_others)
    request = LoadSpan(
        path=str(folder),
        model="m",
        start=0,
        end=2,
        threads=1,
        spill_folder=str(folder.parent),
        team=(1.0,) * (1 + n_others),
        seats=tuple(other.seat() for other in others),
        team_mode="whole",
    )
    return load_engine(request, SIGNALS), others


class Conversation:
    """Tokens that an engine computes, in passes of so many."""

    def __init__(self, engine: LoadedSpan, rows: int = 1) -> None:
        self._engine = engine
        self._rng = torch.Generator().manual_seed(1)
        self._rows = rows
        self.cache = engine.new_cache(engine.span, 4_000)
        self.n = 0
        self.outs: list[torch.Tensor] = []

    def piece(self, n: int) -> SessionTokens:
        hidden = torch.randn(self._rows, n, WIDTH, generator=self._rng)
        positions = torch.arange(self.n, self.n + n).expand(self._rows, -1)
        piece = SessionTokens(hidden, positions, self.cache, self.n)
        self.n += n
        return piece

    def say(self, *passes: int) -> None:
        for n in passes:
            self.outs += self._engine.run([self.piece(n)], self._engine.span)

    def crop(self, n: int) -> None:
        self.cache.crop(n)
        self.n -= n


def differ(ours: Conversation, theirs: Conversation) -> float:
    pairs = zip(ours.outs, theirs.outs, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("n_others", [1, 2])
def test_prompts_that_are_shared_among_tokens_that_are_not(
    n_others: int, far: Callable[[LoadSpan, int], list[FarFollower]], tmp_path: Path
) -> None:
    folder = checkpoints.make("llama", tmp_path / "llama", n_layers=2)
    loaded, others = load(folder, n_others, far)
    span = loaded.engine
    assert isinstance(span, WholeSpan)
    assert loaded.description.team.startswith(f"long prompts are shared among {1 + n_others}")
    assert loaded.description.seats == tuple(range(n_others))
    operations = operations_error(span)
    assert operations.error < 1e-5
    assert operations.can_hand_over
    alone = LoadedSpan(folder, Span(0, 2), torch.float32)
    alone.self_test()
    least = LEAST_ROWS * (1 + n_others)
    shared = []
    original = span._run_shared

    def count(pieces: list[SessionTokens], longest: SessionTokens, hop: Span) -> list[torch.Tensor]:
        shared.append(longest.n_past)
        return original(pieces, longest, hop)

    span._run_shared = count  # type: ignore[method-assign]
    talks = [Conversation(engine, rows) for rows in (1, 2) for engine in (span, alone)]
    for talk in talks:
        talk.say(least, 1, 1, least + 7, least - 1, 1)
        talk.crop(9)
        talk.say(least + 3)
        talk.crop(5)
        talk.say(1, least)
        talk.cache.reorder(torch.tensor([0] if talk.outs[0].shape[0] == 1 else [1, 1]))
        talk.say(least)
    assert differ(talks[0], talks[1]) < 1e-5
    assert differ(talks[2], talks[3]) < 1e-5
    assert len(shared) == 10, "short passes are not shared"
    heirs = [Conversation(engine) for engine in (span, alone)]
    for heir, talk in zip(heirs, talks[:2], strict=True):
        heir.cache.borrow(talk.cache, 100)
        heir.n = 100
        heir.say(least + 1, 1)
    assert differ(*heirs) < 1e-5
    others[0].close()
    for talk in talks:
        talk.say(least, 1, least)
    assert differ(talks[0], talks[1]) < 1e-5
    assert differ(talks[2], talks[3]) < 1e-5
    assert len(shared) == 12, "it goes on alone after the pass that failed"


def test_a_pass_that_fails_at_the_leader_leaves_the_team_as_it_was(
    far: Callable[[LoadSpan, int], list[FarFollower]], tmp_path: Path
) -> None:
    folder = checkpoints.make("llama", tmp_path / "llama", n_layers=2)
    loaded, _ = load(folder, 1, far)
    span = loaded.engine
    assert isinstance(span, WholeSpan)
    talk = Conversation(span)
    blocks = iter([False, True])

    def fail_at_the_second() -> None:
        if next(blocks, False):
            raise RuntimeError("no memory")

    span.on_block = fail_at_the_second
    with pytest.raises(RuntimeError, match="no memory"):
        talk.say(2 * LEAST_ROWS)
    span.on_block = lambda: None
    alone = LoadedSpan(folder, Span(0, 2), torch.float32)
    alone.self_test()
    pair = [Conversation(engine) for engine in (span, alone)]
    for each in pair:
        each.say(2 * LEAST_ROWS, 1, 3 * LEAST_ROWS)
    assert differ(*pair) < 1e-5
    assert span._members, "the member is still there"


def test_windows_are_not_shared(far: Callable[[LoadSpan, int], list[FarFollower]], tmp_path: Path) -> None:
    folder = checkpoints.make("gemma3_text", tmp_path / "gemma", n_layers=2, head_dim=16)
    loaded, (other,) = load(folder, 1, far)
    assert loaded.description.team == "long prompts are not shared: its blocks keep more than plain keys and values"
    assert loaded.description.seats == ()
    other.process.wait(30)
