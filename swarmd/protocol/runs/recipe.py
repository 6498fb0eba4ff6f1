"""A training run as data: the recipe, signed by who starts the run. Nothing in it is ever executed.

A recipe names the model and the data by their hashes (manifests, as for weights), what is trained, optimizer and
schedule, how many samples one update takes, the anchors that sign commits, and when to stop. The sha256 of the signed
bytes is the run's identity. ``RunOrder`` is what its owner says later: stop, go on, other anchors.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from swarmd.config import read_toml as read_any_toml
from swarmd.errors import ConfigError, IntegrityError
from swarmd.names import is_model_hash, require_name
from swarmd.protocol.fields import MAX_STAGES, Block, Count, Digest, Name, Text
from swarmd.protocol.membership.identity import Identity, PublicKey, Signature, public_key_of_untrusted, verify
from swarmd.protocol.untrusted import decode
from swarmd.values import PeerId, RunId, Span

MAX_RECIPE_BYTES = 65_536  # written by a person
MAX_TARGETS = 64  # names of modules that LoRA goes to: last parts, of which a family has a dozen
ALL_LINEAR = "all-linear"  # PEFT's word for every linear module but the head
MAX_ANCHORS = 31  # a majority of them signs each commit
AGAIN = ("parameters", "sum")  # shared vectors where somebody's draws are computed once more
LOCAL = "local"  # a peer's own parameters, where it takes steps by itself
PREVIOUS = "previous"  # the parameters before the last update, which late micro-batches come back on
CHECKED = "checked"  # the sum of what another holder of a stage has added, where it is computed again
ENDS = 0  # the stage of embedding and head; the stages of blocks are counted from 1
_OF_CODECS = {  # which codecs a key of [parts] is for
    "keep": ("topk",),
    "rank": ("powersgd",),
    "threshold": ("significance",),
    "decay": ("topk", "powersgd", "significance"),
}
_OF_KINDS = {  # which optimizers a key of [optimizer] is for
    "momentum": ("sgd", "muon"),
    **dict.fromkeys(("beta1", "beta2", "epsilon", "nesterov"), ("adamw", "muon")),
}
MUON_MOMENTUM = 0.95  # where a file says nothing: Jordan's
MUON_LENGTH = 0.2  # of a step, for each number of the longer side's root: AdamW's usual one (2502.16982)
N_NEWTON_SCHULZ = 5  # steps of Muon's
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # X becomes a X + (b A + c A A) X, A = X X^T: Jordan's
DEFAULT_AUDIT = 32  # 3 % of what a run computes, once its members are known
_RUN_DOMAIN = b"swarmd run 1\0"
_ORDER_DOMAIN = b"swarmd run order 1\0"
_STAGE_DOMAIN = b"swarmd run stage 1\0"
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]
CodecName = Literal["none", "float16", "int8", "topk", "powersgd", "significance"]
Steps = Annotated[int, msgspec.Meta(ge=1, le=10**9)]
Anchors = Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_ANCHORS)]
NumberOfStages = Annotated[int, msgspec.Meta(ge=1, le=MAX_STAGES)]
FirstBlocks = Annotated[tuple[Block, ...], msgspec.Meta(max_length=MAX_STAGES)]


class RecipeTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A table of the recipe: what it does not know is refused."""


class Optimizer(RecipeTable, frozen=True):
    """SGD with momentum, AdamW (Loshchilov & Hutter 2019), or Muon (Jordan et al. 2024) for the matrices of layers.

    With Muon the rest, embedding and head among it, has AdamW, at the same rate: a step of Muon is as long as one of
    AdamW usually is (2502.16982, section 2.2). Weight decay is on matrices only, and decoupled. ``nesterov``: AdamW
    steps as if the next gradient were as this one (Dozat 2016), which makes up for about half of a delay.
    """

    kind: Literal["sgd", "adamw", "muon"] = "adamw"
    learning_rate: Positive = 1e-3
    momentum: Share = 0.0
    beta1: Share = 0.9
    beta2: Share = 0.95
    epsilon: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1e-8
    nesterov: bool = False
    weight_decay: NotNegative = 0.0
    clip_norm: NotNegative = 0.0

    @property
    def price_of_delay(self) -> str:
        """What gradients that are one update late cost (benchmarks.delay), and what to do; "" where it is little."""
        if self.kind == "muon" or self.nesterov:
            return ""
        if self.kind == "sgd":
            return 'SGD learns a tenth less by gradients that are an update late: kind = "muon" hardly does'
        return (
            "AdamW learns 8 to 10 % less by gradients that are an update late: optimizer.nesterov = true makes up for "
            'about half of it, and kind = "muon" hardly loses'
        )

    @property
    def moments(self) -> tuple[str, ...]:
        """The vectors that it keeps beside the parameters."""
        if self.kind in ("adamw", "muon"):
            return ("moment1", "moment2")
        return ("momentum",) if self.momentum else ()


def is_matrix_of_layer(name: str, shape: tuple[int, ...]) -> bool:
    """Is it what Muon is for: a matrix of a numbered layer, or as many as there are experts, by name and shape?

    Embedding and head are not of a layer, and norms, biases and the filters of convolutions are no matrices.
    """
    is_of_layer = any(part.isdecimal() for part in name.split("."))
    return is_of_layer and len(shape) in (2, 3) and min(shape[-2:]) > 1


class Schedule(RecipeTable, frozen=True):
    """The learning rate's factor: up over ``warmup`` updates, then constant, or down to ``floor``.

    The last update is one step before ``floor``, as in transformers' schedules: a rate of 0 would learn nothing.
    """

    decay: Literal["constant", "linear", "cosine"] = "constant"
    warmup: Annotated[int, msgspec.Meta(ge=0, le=10**9)] = 0
    floor: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0


class Batch(RecipeTable, frozen=True):
    """Samples (rows of ``tokens`` tokens) of one update; a peer computes ``micro`` of them at a time."""

    target: Annotated[int, msgspec.Meta(ge=1, le=10**8)] = 256
    micro: Annotated[int, msgspec.Meta(ge=1, le=4_096)] = 4
    tokens: Annotated[int, msgspec.Meta(ge=2, le=65_536)] = 256


class Diloco(RecipeTable, frozen=True):
    """Inner steps of ``batch`` samples by the recipe's optimizer; the outer one is SGD with Nesterov's momentum.

    DiLoCo (Douillard et al. 2023, 2311.08105, algorithm 1). ``fragments``: of the vector, one of which each update
    averages in its turn, while all compute on (Streaming DiLoCo, 2501.18512, section 2); 1: the whole, and all wait.
    """

    batch: Annotated[int, msgspec.Meta(ge=1, le=4_096)] = 8
    learning_rate: Positive = 0.7
    momentum: Share = 0.9
    fragments: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1


class Parts(RecipeTable, frozen=True):
    """How a round's numbers travel (train.vectors.codecs). ``keep``: of each 4,096, for topk; ``rank``: for powersgd.

    ``threshold``: the least relative change that travels, for significance. ``decay``: how much of what a contribution
    has left out goes into the next one (error feedback; 2508.15706, algorithm 1).
    """

    codec: CodecName = "none"
    keep: Literal[16, 32, 64, 128, 256, 512] = 64
    rank: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    threshold: NotNegative = 0.01
    decay: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.95


class LoraSettings(RecipeTable, frozen=True):
    """Which low-rank updates are trained, in PEFT's words. In a file, ``targets`` may be "all-linear"."""

    rank: Annotated[int, msgspec.Meta(ge=1, le=1_024)] = 8
    alpha: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 16
    targets: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_TARGETS)] = ()


class Stop(RecipeTable, frozen=True):
    """The run ends after ``steps`` updates, or when the mean loss of the last ten is at most ``loss``."""

    steps: Steps = 1_000
    loss: NotNegative = 0.0


class Checkpoints(RecipeTable, frozen=True):
    """How often each peer writes the state to its disk, in updates, and how many of them it keeps."""

    every: Steps = 50
    keep: Annotated[int, msgspec.Meta(ge=1, le=100)] = 2


class Recipe(RecipeTable, frozen=True):
    """What a run is. In a file, ``model`` and ``data`` may be paths; in a signed run they are hashes.

    ``robust``: contributions are clipped round the momentum (train.vectors.clipping).
    ``audit``: one contribution in so many is computed again by another member (plan.trust.gradient_audits); 0: none.
    Runs of before say nothing; where a file says nothing, it is ``DEFAULT_AUDIT`` if it can be.
    ``stages``: the first block of each stage where no member holds all of the model; in a file, how many stages,
    or "auto".
    ``activations``: how hidden states travel between them; gradients come back in int8 where that is int4.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    model: Text
    data: Text
    train: Literal["all", "lora"] = "all"
    lora: LoraSettings = LoraSettings()
    synchronisation: Literal["step", "delayed", "diloco"] = "step"
    diloco: Diloco = Diloco()
    topology: Literal["auto", "parts", "server", "sites", "grid", "ring"] = "auto"
    parts: Parts = Parts()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    batch: Batch = Batch()
    precision: Literal["float32", "float64"] = "float32"
    anchors: Anchors = ()
    stop: Stop = Stop()
    checkpoints: Checkpoints = Checkpoints()
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)] = 0
    audit: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0
    robust: Literal["none", "clip"] = "none"
    stages: NumberOfStages | Literal["auto"] | FirstBlocks = ()
    activations: Literal["none", "float16", "int8", "int4"] = "none"

    @property
    def first_blocks(self) -> tuple[int, ...]:
        """The first block of each stage of blocks; () where every member trains the whole model."""
        return self.stages if isinstance(self.stages, tuple) else ()

    def blocks_of_stage(self, stage: int, n_blocks: int) -> Span:
        """The blocks of a stage, counted from 1, of a model with so many."""
        borders = (*self.first_blocks, n_blocks)
        return Span(borders[stage - 1], borders[stage])

    @property
    def is_in_stages(self) -> bool:
        """Do members train a stage of the model each?"""
        return self.stages != ()

    @property
    def why_not_in_stages(self) -> str:
        """Why members cannot train a stage each; "" when they can."""
        if self.train != "all":
            return 'train = "lora" is small: every member holds all of it'
        if self.steps_inside:
            return 'synchronisation = "diloco" is not possible yet, expected "step" or "delayed"'
        if self.overlaps and self.clip_norm:
            return 'optimizer.clip_norm with synchronisation = "delayed" is not possible yet, expected 0 or "step"'
        if self.precision != "float32":
            return f'precision = "{self.precision}" does not travel between stages, expected "float32"'
        if self.robust != "none":
            return f'robust = "{self.robust}" is not possible yet, expected "none"'
        return ""

    @property
    def why_not_audited(self) -> str:
        """Why what its members give cannot be computed again by others; "" when it can."""
        if self.steps_inside:
            return "diloco's inner moments are each peer's own"
        if self.parts.codec in _OF_CODECS["decay"]:
            return f"what {self.parts.codec} has left out is each peer's own"
        return ""

    @property
    def why_not_clipped(self) -> str:
        """Why contributions cannot be clipped round the momentum; "" when they can."""
        if self.steps_inside:
            return "with diloco peers give differences, not gradients"
        if self.parts.codec in _OF_CODECS["decay"]:
            return f"with {self.parts.codec} what was left out comes on top of what is given"
        if self.optimizer.kind == "muon":
            return "muon's momentum is of matrices, and its other moments are AdamW's"
        return "optimizer.clip_norm clips already" if self.optimizer.clip_norm else ""

    @property
    def overlaps(self) -> bool:
        """Do peers compute on while a round averages?"""
        return self.synchronisation == "delayed" or self.fragments > 1

    @property
    def steps_inside(self) -> bool:
        """Do peers take steps of their own between the updates?"""
        return self.synchronisation == "diloco"

    @property
    def shared_vectors(self) -> tuple[str, ...]:
        """What daemon and training worker share: the run's parameters first, then what the worker writes."""
        if self.is_in_stages:
            others = ("sum1", PREVIOUS) if self.overlaps else ()
            return ("parameters", "sum0", *others, *((CHECKED,) if self.audit else ()))
        if self.steps_inside:
            return ("parameters", LOCAL, *self.optimizer.moments)
        return ("parameters", "sum0", "sum1")

    @property
    def fragments(self) -> int:
        """Into how many parts that take turns the vector is divided."""
        return self.diloco.fragments if self.steps_inside else 1

    @property
    def clip_norm(self) -> float:
        """To what norm averages are clipped; 0: not at all."""
        return 0.0 if self.steps_inside else self.optimizer.clip_norm

    def learning_rate(self, step: int) -> float:
        """The learning rate of update ``step``, counted from 1."""
        schedule = self.schedule
        warmup = schedule.warmup
        factor = min(1.0, step / warmup) if warmup else 1.0
        if schedule.decay != "constant" and step > warmup:
            progress = min(1.0, (step - 1 - warmup) / max(1, self.stop.steps - warmup))
            linear = 1 - progress
            cosine = (1 + math.cos(math.pi * progress)) / 2
            decayed = linear if schedule.decay == "linear" else cosine
            factor = schedule.floor + (1 - schedule.floor) * decayed
        return self.optimizer.learning_rate * factor


class _Signed(msgspec.Struct, frozen=True, array_like=True):
    body: Annotated[bytes, msgspec.Meta(max_length=MAX_RECIPE_BYTES)]
    owner: PublicKey
    signature: Signature


class _RunBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    recipe: Recipe
    started_at: Count


@dataclass(frozen=True, slots=True)
class Run:
    """A signed recipe that was checked, with the bytes to pass on."""

    id: RunId
    recipe: Recipe
    owner: bytes
    started_at: int
    raw: bytes
    stage: int | None = None
    """Which stage's ledger ``id`` names, in a run whose members train a stage each."""

    @property
    def whole(self) -> RunId:
        """The run that this is a stage of, or itself."""
        return RunId(hashlib.sha256(self.raw).hexdigest())

    @property
    def genesis(self) -> bytes:
        """What the first commit names as its parent."""
        return bytes.fromhex(self.id)

    def in_stage(self, stage: int) -> Run:
        """One stage of it: a ledger, rounds and states of its own. Raises IntegrityError when it has none such."""
        if not 0 <= stage <= len(self.recipe.first_blocks) or not self.recipe.first_blocks:
            raise IntegrityError(f"the run {self.recipe.name!r} has no stage {stage}")
        name = hashlib.sha256(_STAGE_DOMAIN + bytes.fromhex(self.whole) + stage.to_bytes(2, "big"))
        return dataclasses.replace(self, id=RunId(name.hexdigest()), stage=stage)

    @property
    def stages(self) -> list[Run]:
        """Its stages, embedding and head first; the run itself where every member trains the whole model."""
        n = len(self.recipe.first_blocks)
        return [self.in_stage(stage) for stage in range(n + 1)] if n else [self]


def read_toml(path: Path) -> Recipe:
    """Read a recipe that a person wrote. Raises ConfigError that names the key and what is expected."""
    written = read_any_toml(path)
    lora = written.get("lora")
    if isinstance(lora, dict) and lora.get("targets") == ALL_LINEAR:
        written["lora"] = {**lora, "targets": [ALL_LINEAR]}  # in PEFT it is no list
    optimizer = written.get("optimizer")
    if isinstance(optimizer, dict) and optimizer.get("kind") == "muon" and "momentum" not in optimizer:
        written["optimizer"] = {**optimizer, "momentum": MUON_MOMENTUM}
    stages = written.get("stages", 1)
    if isinstance(stages, str) and stages != "auto":
        raise ConfigError(f'{path}: stages: expected how many, the first block of each, or "auto", got {stages!r}')
    try:
        recipe = msgspec.convert(written, Recipe)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_explain_refusal(str(error), written)}") from None
    require_name("a run", recipe.name)
    unused = _explain_unused(recipe, written)
    if unused:
        raise ConfigError(f"{path}: {unused}")
    for key in written.get("parts", {}):
        codecs = _OF_CODECS.get(key, (recipe.parts.codec,))
        if recipe.parts.codec not in codecs:
            expected = " or ".join(f'"{codec}"' for codec in codecs)
            raise ConfigError(f'{path}: parts.{key} needs codec = {expected}, got "{recipe.parts.codec}"')
    if recipe.robust != "none" and recipe.why_not_clipped:
        reason = recipe.why_not_clipped
        raise ConfigError(f'{path}: robust = "{recipe.robust}" cannot be: {reason}; expected "none"')
    if recipe.is_in_stages and recipe.why_not_in_stages:
        raise ConfigError(f"{path}: stages cannot be: {recipe.why_not_in_stages}")
    if recipe.audit and recipe.why_not_audited:
        raise ConfigError(f"{path}: audit = {recipe.audit} cannot be: {recipe.why_not_audited}; expected 0")
    if "audit" not in written and not recipe.why_not_audited:
        recipe = msgspec.structs.replace(recipe, audit=DEFAULT_AUDIT)
    return recipe


def _explain_unused(recipe: Recipe, written: dict[str, Any]) -> str:
    """What in a file would be passed over, or end a run before it learns, and what it needs; "" where all counts."""
    # A key that does nothing is refused, not passed over: a run takes days, and its author wanted something by it.
    optimizer = recipe.optimizer
    schedule = recipe.schedule
    steps = recipe.stop.steps
    if "diloco" in written and not recipe.steps_inside:
        return f'[diloco] needs synchronisation = "diloco", got "{recipe.synchronisation}"'
    if "activations" in written and not recipe.is_in_stages:
        return "activations travel between stages: stages says how many, got none"
    if "lora" in written and recipe.train != "lora":
        return f'[lora] needs train = "lora", got "{recipe.train}"'
    if recipe.train == "lora" and not recipe.lora.targets:
        return (
            'train = "lora" needs the names of modules: lora.targets, for example ["q_proj", "v_proj"], or "all-linear"'
        )
    for key in written.get("optimizer", {}):
        kinds = _OF_KINDS.get(key, (optimizer.kind,))
        if optimizer.kind not in kinds:
            expected = " or ".join(f'"{kind}"' for kind in kinds)
            return f'optimizer.{key} needs kind = {expected}, got "{optimizer.kind}"'
    if optimizer.nesterov and recipe.steps_inside:
        return "optimizer.nesterov is for steps of the swarm as a whole: with diloco peers' own are not late"
    shrinkage = optimizer.learning_rate * optimizer.weight_decay
    if shrinkage >= 1:
        return (
            f"optimizer.learning_rate times weight_decay is {shrinkage:g}: "
            "each update would take all of every weight away; expected less than 1"
        )
    if schedule.floor and schedule.decay == "constant":
        return 'schedule.floor needs decay = "linear" or "cosine", got "constant"'
    if schedule.warmup >= steps:
        return f"schedule.warmup is {schedule.warmup}, expected less than the {steps} updates of the run (stop.steps)"
    return ""


def _explain_refusal(error: str, written: dict[str, Any]) -> str:
    """A refusal with the key as it is written, what is allowed there, and the value that was found."""
    text, marker, place = error.partition(" - at `$.")
    if not marker:
        return error
    keys = place.rstrip("`")
    value: Any = written
    kind: Any = msgspec.inspect.type_info(Recipe)
    for key in keys.split("."):
        value = value.get(key, "nothing") if isinstance(value, dict) else "nothing"
        fields = getattr(kind, "fields", ())
        kind = next((field.type for field in fields if field.encode_name == key), None)
    if isinstance(kind, msgspec.inspect.LiteralType):
        text = f"expected one of {', '.join(map(str, kind.values))}"
    return f"{keys}: {text}, got {value!r}"


def is_called(query: str, run_id: str, name: str) -> bool:
    """Does a user mean this run: by its name, its hash, or the first six characters of that and more?"""
    return query in (name, run_id) or (len(query) >= 6 and run_id.startswith(query))


def start_run(recipe: Recipe, owner: Identity, started_at: int) -> Run:
    """Sign a recipe whose model and data are hashes. Raises IntegrityError when it cannot be a run."""
    body = msgspec.msgpack.encode(_RunBody(recipe, started_at))
    signed = _Signed(body, owner.public_key, owner.sign(_RUN_DOMAIN, body))
    return read_run_untrusted(msgspec.msgpack.encode(signed))


def read_run_untrusted(raw: bytes) -> Run:
    """Check a run from anywhere. Raises IntegrityError."""
    envelope = decode(raw, _Signed, "a run", IntegrityError)
    verify(envelope.owner, _RUN_DOMAIN, envelope.body, envelope.signature, "a run")
    body = decode(envelope.body, _RunBody, "a run", IntegrityError)
    recipe = body.recipe
    for role, named in (("model", recipe.model), ("data", recipe.data)):
        if not is_model_hash(named):
            raise IntegrityError(f"a run names its {role} by hash, not {named[:64]!r}")
    if not recipe.anchors or len(set(recipe.anchors)) != len(recipe.anchors):
        raise IntegrityError("a run names its anchors, each once")
    for anchor in recipe.anchors:
        public_key_of_untrusted(anchor)
    if recipe.train == "lora" and not recipe.lora.targets:
        raise IntegrityError("a run that trains LoRA names the modules (lora.targets)")
    first_blocks = recipe.first_blocks
    if first_blocks != tuple(sorted(set(first_blocks))) or first_blocks[:1] not in ((), (0,)):
        raise IntegrityError("a run names the first blocks of its stages in order, from 0 on")
    if recipe.is_in_stages and (not first_blocks or recipe.why_not_in_stages):
        raise IntegrityError("a run whose stages cannot be")
    run_id = RunId(hashlib.sha256(raw).hexdigest())
    return Run(run_id, recipe, envelope.owner, body.started_at, raw)


class RunOrder(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a run's owner says after its start. The highest ``sequence`` counts.

    ``anchors`` replaces the recipe's; ``generation`` counts those replacements, and commits carry it; ``earlier`` are
    the anchors of generations 1 to ``generation`` - 1, whose commits still count. ``back_from``, ``back_to``: after
    this commit the run goes back to the state of that one.
    """

    run: Name
    sequence: Count
    state: Literal["running", "stopped"] = "running"
    generation: Count = 0
    anchors: Anchors = ()
    back_from: Digest = b""
    back_to: Digest = b""
    earlier: Annotated[tuple[Anchors, ...], msgspec.Meta(max_length=16)] = ()

    def anchors_of(self, recipe: Recipe) -> tuple[PeerId, ...]:
        """The anchors of now."""
        return tuple(PeerId(a) for a in self.anchors or recipe.anchors)

    def sets_of(self, recipe: Recipe) -> dict[int, tuple[PeerId, ...]]:
        """The anchors of each generation."""
        sets = {0: tuple(map(PeerId, recipe.anchors))}
        for generation, anchors in enumerate(self.earlier, 1):
            sets[generation] = tuple(map(PeerId, anchors))
        sets[self.generation] = self.anchors_of(recipe)
        return sets


def sign_order(order: RunOrder, owner: Identity) -> bytes:
    """An order as a run's owner signs it."""
    body = msgspec.msgpack.encode(order)
    return msgspec.msgpack.encode(_Signed(body, owner.public_key, owner.sign(_ORDER_DOMAIN, body)))


def read_order_untrusted(raw: bytes, run: Run) -> RunOrder:
    """Check what claims to be an order of a run's owner. Raises IntegrityError."""
    envelope = decode(raw, _Signed, "a run's order", IntegrityError)
    if envelope.owner != run.owner:
        raise IntegrityError("an order that is not signed by the run's owner")
    verify(envelope.owner, _ORDER_DOMAIN, envelope.body, envelope.signature, "a run's order")
    order = decode(envelope.body, RunOrder, "a run's order", IntegrityError)
    if len(order.earlier) != max(0, order.generation - 1):
        raise IntegrityError("an order that does not name the anchors of each generation")
    if order.run != run.whole or len(set(order.anchors)) != len(order.anchors):
        raise IntegrityError("an order of another run, or one that names an anchor twice")
    for anchor in order.anchors:
        public_key_of_untrusted(anchor)
    return order
