"""Workers that lie, in ways that only their answers show: ``SWARMD_TEST_LIE`` says how. Of a daemon that is honest.

As a program (``python -m tests.real.liars --home FOLDER up ...``) it is ``swarmd up`` with such a worker.
"""

from __future__ import annotations

import os
import random
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.passes.span import LoadedSpan
from swarmd.compute.serving.engine import LoadedEngine, LoadSignals
from swarmd.compute.serving.engines import EngineKind
from swarmd.compute.serving.torch_engine import load_span, load_torch_engine
from swarmd.compute.serving.worker import Worker
from swarmd.protocol.wire import worker
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import HandOver
from swarmd.protocol.wire.worker import LoadSpan
from swarmd.values import Span

VARIABLE = "SWARMD_TEST_LIE"
LIES = {
    "other weights": "every weight is changed by 1 %",
    "a skipped block": "its second block gives what it is given",
    "swapped blocks": "its first two blocks have each other's weights",
    "int8 as float32": "weights in 8 bits, announced as float32",
    "int4 as float32": "weights in 4 bits, announced as float32",
    "a short context": "it forgets all but the last 16 tokens",
    "input handed back": "it computes nothing",
    "garbage now and then": "one pass in twenty is noise",
    "right for what looks like a check": "it lies about single tokens only, never about several at once",
    "answers of an earlier session": "what it gave at the same place before",
    "a wrong cache migration": "caches that it hands over are changed",
}
HEAD_LIE = "wrong logits"  # of its head; its blocks are right
TUNING_LIES = ("wrong outputs in fine-tuning", "wrong gradients in fine-tuning")
CONTEXT, GARBAGE_SHARE, NOISE = 16, 0.05, 0.01


class LyingSpan(LoadedSpan):
    """Honest until ``lie`` is set."""

    lie = ""

    def begin(self, lie: str) -> None:
        """From now on; every session is computed alone, by the family's own forward."""
        self.lie, self.ragged = lie, None
        self.forget_backends()
        self._seen: dict[int, torch.Tensor] = {}
        self._rng = random.Random(1)
        if lie == "a skipped block":
            self.blocks[1].register_forward_hook(lambda module, given, out: _like(out, given[0]))
        if lie == "swapped blocks":
            one, other = self.blocks[:2]
            one.mlp, other.mlp = other.mlp, one.mlp
        if lie == "other weights":
            for module in self.model.modules():
                if isinstance(weight := getattr(module, "weight", None), torch.Tensor) and weight.is_floating_point():
                    weight.data *= 1 + NOISE * torch.randn(weight.shape).to(weight.dtype)

    @torch.inference_mode()
    def run(self, pieces: Sequence[SessionTokens], hop: Span | None = None) -> list[torch.Tensor]:
        return [self._tell(piece, hop) for piece in pieces]

    def _tell(self, piece: SessionTokens, hop: Span | None) -> torch.Tensor:
        hidden, n_past = piece.hidden, piece.n_past
        n_new = hidden.shape[1]
        if self.lie == "a short context" and n_past > CONTEXT:
            mask = torch.ones(hidden.shape[0], n_past + n_new, dtype=torch.long)
            mask[:, : n_past - CONTEXT] = 0
            piece = replace(piece, mask=mask)
        [out] = super().run([piece], hop)
        if self.lie == "input handed back":
            return hidden.clone()
        if self.lie == "garbage now and then" and self._rng.random() < GARBAGE_SHARE:
            return torch.randn_like(out) * out.std()
        if self.lie == "right for what looks like a check" and n_new == 1:
            return out + 0.05 * (out - hidden)
        if self.lie == "answers of an earlier session" and n_new == 1:
            return self._seen.setdefault(n_past, out).clone()
        return out

    def forward_with_grad(self, hidden: torch.Tensor, *more: Any) -> torch.Tensor:
        out = super().forward_with_grad(hidden, *more)
        if self.lie == "wrong outputs in fine-tuning":
            return out + NOISE * (out - hidden)
        if self.lie == "wrong gradients in fine-tuning":
            return out + 0.05 * (hidden - hidden.detach())
        return out


def _like(out: Any, given: torch.Tensor) -> Any:
    return (given, *out[1:]) if isinstance(out, tuple) else given


class LyingWorker(Worker):
    """A worker with such a span."""

    def __init__(self, connection: socket.socket, lie: str) -> None:
        super().__init__(connection, [EngineKind("lying", lambda request: True, self._load_liar)])
        self._lie = lie

    def _load_liar(self, request: LoadSpan, signals: LoadSignals) -> LoadedEngine:
        loaded = load_torch_engine(request, signals, self._load_span)
        if self._lie == HEAD_LIE and (head := loaded.head) is not None:
            honest = head.largest
            head.largest = lambda rows, *how: honest([-row for row in rows], *how)  # type: ignore[method-assign]
        return loaded

    def _load_span(self, request: LoadSpan, signals: LoadSignals) -> LoadedSpan:
        rounded = {"int8 as float32": "int8", "int4 as float32": "int4"}.get(self._lie, request.quantize)
        span = load_span(msgspec.structs.replace(request, device="cpu", quantize=rounded), signals, LyingSpan)
        assert isinstance(span, LyingSpan)
        span.begin(self._lie)
        return span

    def _take_frame(self, frame: Frame) -> list[bytes]:
        message = worker.decode(frame.header)
        if isinstance(message, HandOver) and self._lie == "a wrong cache migration":
            assert self._scheduler is not None
            cache = self._scheduler._queues.sessions[message.session, message.start].state.cache.cache
            for layer in cache.layers:
                if getattr(layer, "values", None) is not None:
                    layer.values = layer.values * 1.5
        return super()._take_frame(frame)


def main() -> None:
    """A worker's entry, as swarmd.compute.serving.worker's."""
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        try:
            LyingWorker(connection, os.environ[VARIABLE]).run()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


def up(home: Path, **flags: str | bool | None) -> None:
    """``swarmd up``, with lying workers."""
    import trio

    from swarmd import config, daemon, logs
    from swarmd.home.paths import Home
    from swarmd.train.gradients import training_worker as training

    training.MODULE = "tests.real.lying_trainers"  # it is honest unless a lie of its own is asked for

    settings = config.load(home, **flags)
    logs.configure(settings.log_format, verbose=False)
    trio.run(daemon.main, Home(home), settings, lambda running: None, "tests.real.liars")


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path)
    parser.add_argument("verb", choices=["up"])
    for option in ("--listen", "--serve", "--blocks"):
        parser.add_argument(option)
    parser.add_argument("--no-serve", action="store_true")
    given = parser.parse_args()
    serves = False if given.no_serve else None
    up(given.home, listen=given.listen, model=given.serve, blocks=given.blocks, serve=serves)
