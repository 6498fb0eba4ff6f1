"""How far apart honest machines are for the same input, and how far cheats: the basis of ``plan.trust.equality``.

python -m benchmarks.equality [--tokens 200]

SmolLM2-135M-Instruct on a text, three spans of ten blocks. *Honest* is what the worker's own engine gives when tokens
come one by one, alone or beside three other sessions, against one prefill of the same inputs. A cheat is held against
the honest prefill. Errors are each token's, relative to what the span added (plan.trust.equality.measure_errors), and
the same of 16 numbers of a seeded projection.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory

import numpy as np
import safetensors.torch
import torch
from transformers import AutoTokenizer

from swarmd.compute.model.ends import Ends
from swarmd.compute.passes.backend_selection import select_backends
from swarmd.compute.passes.span import LoadedSpan, LoadOptions
from swarmd.compute.serving.scheduler import Scheduler
from swarmd.plan.trust.equality import BOUNDS, measure_errors, project_tokens
from swarmd.protocol.wire import worker
from swarmd.protocol.wire.frames import FrameDecoder
from swarmd.protocol.wire.messages import Op, OpenSession, encode_frame
from swarmd.values import Span
from swarmd.wire.history import Budget, SentOp
from swarmd.wire.ops import encode_op
from swarmd.wire.tensors import unpack_untrusted
from tests.real.smollm2 import smollm2

SPANS = (Span(0, 10), Span(10, 20), Span(20, 30))
CONTEXT = 32  # tokens that a server keeps which cuts the context short


class Sessions:
    """Sessions in a worker's engine, without the worker."""

    def __init__(self, span: LoadedSpan) -> None:
        self._scheduler = Scheduler(span, Budget())
        self._span = span
        self._seq = 0

    def open(self, number: int) -> None:
        opening = OpenSession(
            session=bytes([number]) * 16, start=self._span.span.start, end=self._span.span.end, max_tokens=1024
        )
        self._take(encode_frame(opening))

    def step(self, given: dict[int, torch.Tensor], at: int) -> dict[int, torch.Tensor]:
        """One op [1, t, d] for each of some sessions, computed together; their tokens are at ``at``."""
        self._seq += 1
        for number, hidden in given.items():
            positions = torch.arange(at, at + hidden.shape[1], dtype=torch.int32)[None]
            sent = SentOp(self._seq, (), hidden, positions, None)
            key = bytes([number]) * 16
            self._take(
                encode_op(Op(session=key, start=self._span.span.start, epoch=1, settled=self._seq - 1), sent, "raw")
            )
        outs: dict[int, list[torch.Tensor]] = {number: [] for number in given}
        while self._scheduler.has_work:
            for raw in [*self._scheduler.run_pass(), *self._scheduler.settle()]:
                (frame,) = FrameDecoder().feed_untrusted(raw)
                op = worker.decode(frame.header)
                assert isinstance(op, Op), op
                assert op.tensor is not None
                outs[op.session[0]].append(unpack_untrusted(op.tensor, frame.payload)[0])
        return {number: torch.cat(parts, 1) for number, parts in outs.items()}

    def _take(self, raw: bytes) -> None:
        (frame,) = FrameDecoder().feed_untrusted(raw)
        for _ in self._scheduler.take(worker.decode(frame.header), frame):
            pass  # that the session is open


def prefill(span: LoadedSpan, entered: torch.Tensor) -> torch.Tensor:
    sessions = Sessions(span)
    sessions.open(1)
    return sessions.step({1: entered}, 0)[1]


def one_by_one(span: LoadedSpan, entered: torch.Tensor, n_sessions: int) -> torch.Tensor:
    sessions = Sessions(span)
    for number in range(1, n_sessions + 1):
        sessions.open(number)
    outs = []
    for t in range(entered.shape[1]):
        given = {number: entered[:, t : t + 1].roll(number - 1, 2) for number in range(1, n_sessions + 1)}
        outs.append(sessions.step(given, t)[1])
    return torch.cat(outs, 1)


def in_parts(span: LoadedSpan, entered: torch.Tensor, *parts: Span) -> torch.Tensor:
    """Some blocks of a span, one part after the other."""
    positions = torch.arange(entered.shape[1])[None]
    for part in parts:
        entered = span.forward(entered, positions, hop=part)
    return entered


def cut_short(span: LoadedSpan, entered: torch.Tensor) -> torch.Tensor:
    outs = []
    for t in range(entered.shape[1]):
        first = max(0, t + 1 - CONTEXT)
        outs.append(span.forward(entered[:, first : t + 1], torch.arange(first, t + 1)[None])[:, -1:])
    return torch.cat(outs, 1)


def noisy(folder: Path, to: Path, share: float) -> Path:
    """The same checkpoint with every weight changed by about this share of its size."""
    shutil.copytree(folder, to)
    rng = torch.Generator().manual_seed(0)
    for path in to.glob("*.safetensors"):
        tensors = safetensors.torch.load_file(path)
        changed = {
            name: (t.float() * (1 + share * torch.randn(t.shape, generator=rng))).to(t.dtype)
            for name, t in tensors.items()
        }
        safetensors.torch.save_file(changed, path)
    return to


def cheats(
    folder: Path, noise: Path, span: Span, dtype: str, entered: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    kind, s, e = getattr(torch, dtype), span.start, span.end
    honest = LoadedSpan(folder, span, kind)
    for name, other in (("int8 weights", "int8"), ("int4 weights", "int4")):
        yield name, prefill(LoadedSpan(folder, span, kind, LoadOptions(quantize=other)), entered)
    if dtype == "float32":
        other_dtype = LoadedSpan(folder, span, torch.bfloat16)
        yield "bfloat16", prefill(other_dtype, entered.bfloat16()).float()
    yield "weights and 1 % noise", prefill(LoadedSpan(noise, span, kind), entered)
    middle = (s + e) // 2
    yield "a block left out", in_parts(honest, entered, Span(s, middle), Span(middle + 1, e))
    swapped = (Span(s, middle), Span(middle + 1, middle + 2), Span(middle, middle + 1), Span(middle + 2, e))
    yield "two blocks swapped", in_parts(honest, entered, *swapped)
    yield f"context cut to {CONTEXT}, later tokens", cut_short(honest, entered)
    yield "input handed back", entered


def row(name: str, found: np.ndarray, projections: np.ndarray, dtype: str) -> str:
    q = [f"{float(v):.1e}" for v in (found.min(), *np.quantile(found, [0.01, 0.5, 0.99]), found.max(), found.mean())]
    beyond = float((found > BOUNDS[dtype].token).mean())
    return f"| {dtype} | {name} | {' | '.join(q)} | {np.median(projections):.1e} | {100 * beyond:.1f} % |"


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200)
    n_tokens = parser.parse_args().tokens
    torch.set_num_threads(1)
    folder = smollm2()
    ids = AutoTokenizer.from_pretrained(folder)("\n".join(topics.values()))["input_ids"][5000 : 5000 + n_tokens]
    embedded = Ends(folder, torch.float32).embed([ids], [0])[0].view(1, n_tokens, -1)
    whole = LoadedSpan(folder, Span(0, 30), torch.float32)
    entering = [embedded]
    for span in SPANS[:-1]:
        entering.append(in_parts(whole, entering[-1], span))
    del whole
    print("| dtype | what | least | 1 % | median | 99 % | most | mean | projected, median | beyond the bound |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    with TemporaryDirectory() as temporary:
        noise = noisy(folder, Path(temporary) / "noise", 0.01)
        for dtype in ("float32", "bfloat16"):
            found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
            for span, entered32 in zip(SPANS, entering, strict=True):
                entered = entered32.to(getattr(torch, dtype))
                loaded = LoadedSpan(folder, span, getattr(torch, dtype))
                loaded.self_test()
                select_backends(loaded)
                again = prefill(loaded, entered)
                lefts = [(f"honest, one by one, {n} at once", one_by_one(loaded, entered, n)) for n in (1, 4)]
                if dtype == "float32":
                    for kind in ("int8", "int4"):
                        rounded = LoadedSpan(folder, span, torch.float32, LoadOptions(quantize=kind))
                        rounded.self_test()
                        select_backends(rounded)
                        base, steps = prefill(rounded, entered), one_by_one(rounded, entered, 1)
                        note(found, f"honest, one by one, both {kind}", entered, steps, base)
                for name, left in [*lefts, *cheats(folder, noise, span, dtype, entered)]:
                    late = slice(2 * CONTEXT, None) if "later" in name else slice(None)
                    note(found, name, entered[:, late], left[:, late], again[:, late])
            for name, pairs in found.items():
                exact, small = (np.concatenate(part) for part in zip(*pairs, strict=True))
                print(row(name, exact, small, dtype), flush=True)


def note(
    found: dict[str, list[tuple[np.ndarray, np.ndarray]]],
    name: str,
    entered: torch.Tensor,
    left: torch.Tensor,
    again: torch.Tensor,
) -> None:
    bound = BOUNDS["float32"]
    before, after, recomputed = (t.float().numpy() for t in (entered, left, again))
    exact = measure_errors(before, after, recomputed, bound)
    small = measure_errors(project_tokens(before, 7), project_tokens(after, 7), project_tokens(recomputed, 7), bound)
    found.setdefault(name, []).append((exact, small))


if __name__ == "__main__":
    main()
