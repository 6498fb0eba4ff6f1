"""The training worker: torch, no network. It computes gradients of the rows that its daemon sends, and nothing else.

Parameters and sums of gradients lie in memory that it shares with the daemon, which averages them and takes the
optimizer's steps. A sum is written to the buffer that the last one is not in: whenever this process is stopped or
killed, what it had finished before is whole. Where the recipe has steps inside (DiLoCo), it takes those itself.
"""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from swarmd.compute.hardware.device import device_description, pick_device, use_threads
from swarmd.compute.hardware.worker_process import serve_daemon
from swarmd.compute.model.checkpoint_tensors import is_quantised
from swarmd.compute.model.plain_config import building, read_config
from swarmd.compute.model.skeleton import load_whole
from swarmd.compute.runs.expert_balance import balance_factor
from swarmd.compute.runs.inner_steps import take_step
from swarmd.compute.runs.lora import with_recipe_lora
from swarmd.compute.runs.shared_vectors import DTYPES, SharedVectors
from swarmd.compute.runs.stages import TrainedStage
from swarmd.errors import ConfigError, RemoteProtocolError
from swarmd.protocol.models import shards
from swarmd.protocol.runs.recipe import AGAIN, LOCAL, Recipe, read_run_untrusted
from swarmd.protocol.untrusted import decode
from swarmd.protocol.wire import messages, worker
from swarmd.protocol.wire.frames import Frame, FrameDecoder
from swarmd.protocol.wire.worker import (
    Compute,
    ComputeAgain,
    ComputedRows,
    ComputeStage,
    LoadRun,
    MapRun,
    RunLoaded,
    RunMapped,
    StageComputed,
    StageInputs,
    WorkerFailed,
)
from swarmd.weights.folder import MANIFEST
from swarmd.wire.micro_batches import pieces

_RECEIVE_BYTES = 1 << 20  # a micro-batch of token ids and much more
TRIED_TOKENS = 16  # of each row, to find out whether gradients repeat
REPEATS_WITHIN = 0.01  # of the gradient's norm: a fifth of what an audit allows, and more than rounding


# Who writes where. All vectors lie one after the other in one shared file, and each has the layout of the model:
#
#     daemon   parameters --------------> the model's own tensors are views of it (a card gets a copy each time)
#     worker   sum0, sum1 <-- gradients   in turns: the new sum is the other one plus the newest gradient
#
# The daemon reads the sum that was answered last. A worker that is killed in the middle of a sum leaves half of one,
# in the buffer that nobody reads; so nothing needs a lock, and nothing finished is lost.
class TrainedModel:
    """A model whose trained parameters, and sums of their gradients, lie in one flat vector each."""

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        device: str,
    ) -> None:
        self.model = model.train().to(device)
        self._recipe = recipe
        self._vectors = SharedVectors(model, recipe.precision, device)
        self._device = device
        self._balance_factor = balance_factor(model)

    @property
    def layout(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the trained parameters, in the order in which they lie in a vector."""
        return self._vectors.layout

    def map(self, path: Path, init: bool) -> None:
        """Use shared memory (Recipe.shared_vectors). With ``init`` the parameters go there, else come from it."""
        working = LOCAL if self._recipe.steps_inside else "parameters"
        self._vectors.map(path, self._recipe.shared_vectors, working, init)

    def compute(
        self,
        rows: torch.Tensor,
        seed: int,
        into: int,
        is_fresh: bool,
    ) -> float:
        """Add the gradient of the summed loss of ``rows`` [n, t + 1] to the other sum, and write it to ``into``."""
        self._vectors.fetch_parameters()
        loss = self._run_backward(rows, seed)
        sums = self._vectors.cut(self._vectors.shared[f"sum{into}"])
        previous_sums = self._vectors.cut(self._vectors.shared[f"sum{1 - into}"])
        parameters = [parameter for _, parameter in self._vectors.parameters]
        for parameter, total, previous in zip(parameters, sums, previous_sums, strict=True):
            gradient = torch.zeros_like(total) if parameter.grad is None else parameter.grad.to("cpu")
            if is_fresh:
                total.copy_(gradient)
            else:
                torch.add(previous, gradient, out=total)
            parameter.grad = None
        return loss

    def compute_again(
        self,
        rows: torch.Tensor,
        seed: int,
        path: Path,
    ) -> float:
        """Add the gradient of the summed loss of ``rows`` [n, t + 1] to a sum, both on other memory (AGAIN)."""
        vectors = self._vectors.map_vectors(path, AGAIN)
        with self._using_parameters(self._vectors.cut(vectors["parameters"])):
            loss = self._run_backward(rows, seed)
            sums = self._vectors.cut(vectors["sum"])
            for (_, parameter), total in zip(self._vectors.parameters, sums, strict=True):
                if parameter.grad is not None:
                    total += parameter.grad.to("cpu")
                parameter.grad = None
        return loss

    def is_repeatable(self, vocabulary: int) -> bool:
        """Do the same rows give the same gradients however they are divided? Not with dropout or noise in a router."""
        n_tokens = min(TRIED_TOKENS, self._recipe.batch.tokens)  # a model may have no more positions
        rng = torch.Generator().manual_seed(0)
        rows = torch.randint(
            0,
            vocabulary,
            (2, n_tokens + 1),
            generator=rng,
        )
        joint = self._flat_gradient([rows], seed=1)
        separate = self._flat_gradient([rows[:1], rows[1:]], seed=2)
        return float((joint - separate).norm()) <= REPEATS_WITHIN * float(joint.norm())

    def _flat_gradient(
        self,
        batches: list[torch.Tensor],
        seed: int,
    ) -> torch.Tensor:
        """Compute the gradient of the summed loss of some rows, flat, on the CPU."""
        for batch in batches:
            self._run_backward(batch, seed)
        with_gradient = [p for _, p in self._vectors.parameters if p.grad is not None]
        flat = torch.cat([p.grad.flatten().to("cpu") for p in with_gradient])  # type: ignore[union-attr]
        for parameter in with_gradient:
            parameter.grad = None
        return flat

    @contextlib.contextmanager
    def _using_parameters(self, pieces: list[torch.Tensor]) -> Iterator[None]:
        """Compute on other parameters for a while."""
        originals = [parameter.data for _, parameter in self._vectors.parameters]
        try:
            for (_, parameter), piece in zip(self._vectors.parameters, pieces, strict=True):
                parameter.data = piece.to(self._device)
            yield
        finally:
            for (_, parameter), values in zip(self._vectors.parameters, originals, strict=True):
                parameter.data = values
                parameter.grad = None

    def step(
        self,
        rows: torch.Tensor,
        seed: int,
        number: int,
        learning_rate: float,
    ) -> float:
        """Take a step of the recipe's optimizer by the mean gradient of ``rows`` [n, t + 1], on the peer's own vectors.

        Returns their summed loss. A card has copies of those: what the daemon reads is brought back each time.
        """
        self._vectors.fetch_parameters()
        micro = self._recipe.batch.micro
        losses = []
        for start in range(0, len(rows), micro):
            losses.append(self._run_backward(rows[start : start + micro], seed + start))
        loss = sum(losses)
        parameters: list[torch.Tensor] = [p for _, p in self._vectors.parameters]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= len(rows)
        moments = {}
        for name in self._recipe.optimizer.moments:
            pieces = self._vectors.cut(self._vectors.shared[name])
            moments[name] = [piece.to(self._device) for piece in pieces]
        names = [name for name, _ in self._vectors.parameters]
        take_step(self._recipe.optimizer, names, parameters, moments, learning_rate, number)
        if self._device != "cpu":
            computed = {**moments, LOCAL: [p.detach() for p in parameters]}
            for name, pieces in computed.items():
                shared_pieces = self._vectors.cut(self._vectors.shared[name])
                for shared_piece, piece in zip(shared_pieces, pieces, strict=True):
                    shared_piece.copy_(piece)
        return loss

    def _run_backward(self, rows: torch.Tensor, seed: int) -> float:
        """Add the gradients of the summed loss of ``rows`` [n, t + 1], which is returned, to the parameters'."""
        torch.manual_seed(seed)
        rows = rows.to(self._device)
        batches = rows.unsqueeze(1).unbind() if self._balance_factor else [rows]
        loss = torch.stack([self._summed_loss(batch) for batch in batches]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def _summed_loss(self, rows: torch.Tensor) -> torch.Tensor:
        """Compute the summed loss of ``rows``: of one only where experts are balanced (compute.runs.expert_balance)."""
        output = self.model(input_ids=rows[:, :-1], use_cache=False)
        dtype = torch.promote_types(output.logits.dtype, torch.float32)
        logits = output.logits.flatten(0, 1).to(dtype)
        targets = rows[:, 1:].flatten()
        losses = nn.functional.cross_entropy(logits, targets, reduction="none")
        loss = losses.view(len(rows), -1).mean(1).sum()
        unbalanced = getattr(output, "aux_loss", None) if self._balance_factor else None
        return loss if unbalanced is None else loss + self._balance_factor * unbalanced


def build(path: Path, recipe: Recipe) -> nn.Module:
    """Build the model as the recipe trains it: all of it, or LoRA on it. Raises ConfigError."""
    torch.manual_seed(recipe.seed)
    dtype = DTYPES[recipe.precision]
    if is_quantised(path):  # transformers' own loader would pass over what it has no name for
        model = load_whole(path, dtype).requires_grad_(True)
    else:
        with building(f"{path} cannot be loaded"), _with_index(path) as folder:
            config = read_config(folder)
            model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, local_files_only=True)
    model.get_input_embeddings().padding_idx = None  # no row is padded: in many models it is the end between two texts
    if recipe.train == "all":
        return model  # type: ignore[no-any-return]
    return with_recipe_lora(model, recipe.lora).to(dtype)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _with_index(folder: Path) -> Iterator[Path]:
    """Give a checkpoint as transformers expects it: one that swarmd filled has a file for each block, and no index."""
    if not (folder / MANIFEST).is_file():
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        weight_map = {}
        for path in folder.iterdir():
            (Path(temporary) / path.name).symlink_to(path.resolve())
            if path.suffix == ".safetensors":
                with path.open("rb") as file:
                    for place in shards.read_header(file, path, path.stat().st_size):
                        weight_map[place.name] = path.name
        index = {"metadata": {}, "weight_map": weight_map}
        (Path(temporary) / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        yield Path(temporary)


class GradientWorker:
    """Takes one frame after the other, answers each."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._trained: TrainedModel
        self._stage: TrainedStage
        self._maps: Callable[[Path, bool], None]
        self._pieces: list[memoryview] = []

    def run(self) -> None:
        decoder = FrameDecoder()
        while data := self._connection.recv(_RECEIVE_BYTES):
            for frame in decoder.feed_untrusted(data):
                for answer in self._answer_frame(frame):
                    self._connection.sendall(answer)

    def _answer_frame(self, frame: Frame) -> Iterator[bytes]:
        message: Any = worker.decode(frame.header)
        if isinstance(message, LoadRun):
            try:
                yield self._load_run(message, bytes(frame.payload))
            except (ConfigError, torch.OutOfMemoryError) as error:
                yield messages.encode_frame(WorkerFailed(message=str(error)[:4000]))
        elif isinstance(message, MapRun):
            self._maps(Path(message.path), message.init)
            yield messages.encode_frame(RunMapped())
        elif isinstance(message, ComputeStage):
            self._pieces.append(frame.payload)
            if message.part[0] + 1 == message.part[1]:
                yield from self._compute_stage(message)
        else:
            yield self._compute(message, frame)

    def _compute_stage(self, message: ComputeStage) -> Iterator[bytes]:
        raw = b"".join(self._pieces)
        self._pieces = []
        try:
            inputs = decode(raw, StageInputs, "what a stage takes")
            loss, result = self._stage.compute(message, inputs)
        except (RemoteProtocolError, torch.OutOfMemoryError) as error:
            yield messages.encode_frame(StageComputed(failure=str(error)[:500]))
            return
        for number, n, piece in pieces(result):
            yield messages.encode_frame(StageComputed(loss, part=(number, n)), piece)

    def _compute(self, message: Any, frame: Frame) -> bytes:
        assert isinstance(message, Compute | ComputeAgain), "the daemon sends nothing else"
        ids = torch.frombuffer(bytearray(frame.payload), dtype=torch.int32)
        rows = ids.long().view(message.n, -1)
        if isinstance(message, ComputeAgain):
            try:
                loss = self._trained.compute_again(rows, message.seed, Path(message.path))
            except torch.OutOfMemoryError as error:  # it takes the parameters twice
                return messages.encode_frame(WorkerFailed(message=str(error)[:4000]))
        elif message.step:
            loss = self._trained.step(
                rows,
                message.seed,
                message.step,
                message.learning_rate,
            )
        else:
            loss = self._trained.compute(
                rows,
                message.seed,
                message.into,
                message.is_fresh,
            )
        return messages.encode_frame(ComputedRows(loss=loss))

    def _load_run(self, message: LoadRun, raw: bytes) -> bytes:
        use_threads(message.threads)
        recipe = read_run_untrusted(raw).recipe
        device = pick_device()
        if message.stage is not None:
            self._stage = TrainedStage(Path(message.path), recipe, message.stage, device)
            self._maps = self._stage.map
            described = RunLoaded(device=device_description(device)[0])
            return messages.encode_frame(described, msgspec.msgpack.encode(self._stage.layout))
        model = build(Path(message.path), recipe)
        self._trained = TrainedModel(model, recipe, device)
        self._maps = self._trained.map
        vocabulary = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
        loaded = RunLoaded(
            device=device_description(device)[0],
            vocabulary=vocabulary,
            is_repeatable=self._trained.is_repeatable(vocabulary),
        )
        return messages.encode_frame(loaded, msgspec.msgpack.encode(self._trained.layout))


def main() -> None:
    """Serve the socket whose number is the first argument."""
    serve_daemon("training worker", lambda connection: GradientWorker(connection).run())


if __name__ == "__main__":
    main()
