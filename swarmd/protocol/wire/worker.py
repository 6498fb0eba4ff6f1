"""What a daemon and its workers say to each other, over a socket that no peer can reach.

The frames are those of the wire, and what peers send about sessions and lanes is passed on as it came; the rest is
here, and only here: a peer that sends one of these sends a tag that ``messages`` does not know. A request of the
daemon carries ``id`` and its answer ``re``, in the one id space of its link (node.worker.worker_link).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from swarmd.config import MOST_MEMBERS, TeamMode
from swarmd.errors import RemoteProtocolError
from swarmd.protocol.fields import Block, Count, Message, Name, Part, Request, SessionKey, Stage, Text
from swarmd.protocol.wire import messages, tuning
from swarmd.protocol.wire.teams import Host, TeamSeat
from swarmd.protocol.wire.tickets import NO_TICKET, DialTicket

FilePath = Annotated[str, msgspec.Meta(max_length=4096)]
Weight = Annotated[float, msgspec.Meta(gt=0)]
Threads = Annotated[int, msgspec.Meta(ge=0, le=1024)]


class LoadSpan(Message, tag="load", frozen=True):
    """Daemon to worker: load blocks [start, end) of the checkpoint in ``path``; with ``head`` what is behind, too.

    Without ``compiled`` no code is compiled for this CPU: the library's own kernels compute all of it.
    ``cache_tokens``: of all sessions, for engines that reserve them at once. ``team``: weights of several processes
    that compute the blocks together; those behind the first are at ``seats`` of other machines, if there are any. Of
    ``team_mode`` "auto" the worker finds out whether they, and which, are quicker than it is alone; of "whole" each
    holds all of the blocks, and they share long prompts. ``n_bytes``: what the
    blocks are to take; 0 is unknown.
    """

    path: FilePath = ""
    model: Name = ""
    start: Block = 0
    end: Block = 0
    dtype: Name = "float32"
    quantize: Name = "none"
    kv_cache: Name = "none"
    threads: Threads = 0
    device: Name = ""
    history_bytes: Count = 0
    tuning_bytes: Count = 0
    tuning_share: float = 0.0
    leave_free_bytes: Count = 0
    spill_folder: FilePath = ""
    head: bool = False
    compiled: bool = True
    cache_tokens: Count = 0
    team: Annotated[tuple[Weight, ...], msgspec.Meta(max_length=MOST_MEMBERS)] = ()
    seats: Annotated[tuple[TeamSeat, ...], msgspec.Meta(max_length=MOST_MEMBERS)] = ()
    team_mode: TeamMode = "weights"
    n_bytes: Count = 0


class FollowTeam(Message, tag="follow", frozen=True):
    """Daemon to worker: be a member of a team that a worker of another machine leads.

    ``load`` says where the blocks are, and how much of this machine to use; all else of it is the leader's. Others
    dial this worker on ``hosts``.
    """

    load: LoadSpan = LoadSpan()
    hosts: Annotated[tuple[Host, ...], msgspec.Meta(max_length=16)] = ()


class Seated(Message, tag="seated", frozen=True):
    """Worker to daemon: others can dial it."""

    ticket: DialTicket = NO_TICKET


class Followed(Message, tag="followed", frozen=True):
    """Worker to daemon: what it is in the team."""

    text: Text = ""


class Rest(Message, tag="rest", frozen=True):
    """Daemon to worker: begin no other pass; caches of sessions that wait for none may still be handed over."""


class SetComputeShare(Message, tag="work", frozen=True):
    """Daemon to worker: compute for this share of the time, and rest for the others'."""

    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0


class LoadAdapter(Request, tag="load_adapter", frozen=True):
    """Daemon to worker: have a LoRA ready for sessions; ``shards`` are its files, the payload its configuration."""

    adapter: Name = ""
    shards: Annotated[tuple[FilePath, ...], msgspec.Meta(max_length=8)] = ()


class AdapterLoaded(Message, tag="adapter_loaded", frozen=True):
    """Worker to daemon: the adapter is ready, or ``failure`` says why it cannot be used."""

    re: Count = 0
    failure: Text = ""


class Measured(Message, tag="measured", frozen=True):
    """Worker to daemon, at load and now and then: tokens/s of one stream, and the total of ``n`` in one pass."""

    decode_tokens_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    batch_tokens_per_s: dict[int, float] = msgspec.field(default_factory=dict)


class Loaded(Message, tag="loaded", frozen=True):
    """Worker to daemon: the span is ready; what it runs on and how fast it was measured to be.

    ``device_free_bytes``: of a device's own memory, beside the span. ``hidden``: numbers that travel of a token, the
    last ``digits`` of which are digits of its id.
    ``weights``: their format where it is the checkpoint's and not what was asked for; else "".
    ``cache_tokens``: those that are reserved for all sessions, by an engine that does that at once; else 0.
    ``team``: what its members are worth, or why there is none; ``seats``: those of the request that are in it.
    """

    device: Text = ""
    device_memory_bytes: Count | None = None
    device_free_bytes: Count | None = None
    numerics: Name = ""
    weights: Name = ""
    quantization_error: float | None = None
    hidden: Count = 0
    digits: Count = 0
    layer_arity: Count = 0
    cache_bytes_per_token: Count = 0
    cache_tokens: Count = 0
    batching: Text = ""
    kernels: Text = ""
    team: Text = ""
    seats: Annotated[tuple[int, ...], msgspec.Meta(max_length=MOST_MEMBERS)] = ()
    has_head: bool = False
    speed: Measured = Measured()


class Loading(Message, tag="loading", frozen=True):
    """Worker to daemon, while it loads: what it does, and how much of that is done."""

    stage: Text = ""
    done: Count = 0
    total: Count = 0


class Improved(Message, tag="improved", frozen=True):
    """Worker to daemon, when it serves already: what was found out since it said Loaded."""

    kernels: Text = ""
    quantization_error: float | None = None


class Done(Message, tag="done", frozen=True):
    """Worker to daemon: a silent op was executed, and nothing travels on; of op 0: the session is open.

    What the worker said before that is of a session that had the same name before.
    """

    session: SessionKey = b"\0" * 16
    start: Block = 0
    seq: Count = 0


class Tick(Message, tag="tick", frozen=True):
    """Worker to daemon: how many frames are dealt with so far. Sent with all answers, and twice a second in a pass.

    ``reused`` tokens were copied from other sessions that begin alike, and not computed.
    """

    handled: Count = 0
    reused: Count = 0


class WorkerFailed(Message, tag="worker_failed", frozen=True):
    """Worker to daemon: the load cannot succeed, and why."""

    message: FilePath = ""


class Ending(Message, tag="ending", frozen=True):
    """Worker to daemon: the last that it says, and why it ends. Another one may do better."""

    reason: Text = ""


class LoadRun(Message, tag="load_run", frozen=True):
    """Daemon to worker: load the model to be trained, or one stage of it; the payload is the recipe, as signed."""

    path: FilePath = ""
    threads: Threads = 0
    stage: Stage | None = None


class RunLoaded(Message, tag="run_loaded", frozen=True):
    """Worker to daemon: what is trained, in the payload: a list of (name, shape), in the order of the vector.

    ``is_repeatable``: the same rows give the same gradients however they are divided, as without dropout; it was tried.
    """

    device: Text = ""
    vocabulary: Count = 0
    is_repeatable: bool = True


class MapRun(Message, tag="map_run", frozen=True):
    """Daemon to worker: the shared memory, of Recipe.shared_vectors; ``init``: write the parameters."""

    path: FilePath = ""
    init: bool = False


class RunMapped(Message, tag="run_mapped", frozen=True):
    """Worker to daemon: it is in use."""


class Compute(Message, tag="compute", frozen=True):
    """Daemon to worker: add the gradients of rows to a sum and write it to buffer ``into``, or begin with them.

    With ``step``: take the step of this number by their mean instead. The payload is int32 tokens [n, t + 1].
    """

    n: Annotated[int, msgspec.Meta(ge=1, le=4_096)] = 1
    seed: Count = 0
    into: Annotated[int, msgspec.Meta(ge=0, le=1)] = 0
    is_fresh: bool = False
    step: Count = 0
    learning_rate: float = 0.0


class ComputeAgain(Message, tag="compute_again", frozen=True):
    """Daemon to worker: add the gradients of rows to a sum, both on the memory at ``path``: parameters, then the sum.

    The payload is as of ``Compute``.
    """

    path: FilePath = ""
    n: Annotated[int, msgspec.Meta(ge=1, le=4_096)] = 1
    seed: Count = 0


class ComputedRows(Message, tag="computed", frozen=True):
    """Worker to daemon: the sum is written; ``loss`` is the rows' sum, nats a token each."""

    loss: float = 0.0


class ComputeStage(Message, tag="compute_stage", frozen=True):
    """Daemon to worker: one pass of a micro-batch through a stage; its payload is ``StageInputs``.

    Of blocks: ``forward``, and ``backward``, which adds the gradients of the stage's parameters to its sum. Of a
    model's ends: ``embed``, ``head``, which gives the gradient by what left the last block, and ``add``, which adds the
    gradients of both ends, to sum ``into``. ``is_fresh``: the sum begins anew with it. ``on_previous``: computed on the
    parameters before the last update. ``check``: all passes of a micro-batch that another holder has computed, added to
    a sum of their own, and compared.
    """

    act: Literal["forward", "backward", "embed", "head", "add", "check"] = "forward"
    batch: Text = ""
    is_fresh: bool = False
    seed: Count = 0
    part: Part = (0, 1)
    into: Annotated[int, msgspec.Meta(ge=0, le=1)] = 0
    on_previous: bool = False


class StageInputs(msgspec.Struct, frozen=True, array_like=True):
    """What a pass takes: int32 token ids [n, t + 1], what came forward, what came back (wire.activations).

    ``given_forward`` and ``given_backward``: what another holder says has come of it.
    """

    n: Count = 0
    ids: bytes = b""
    forward: bytes = b""
    backward: bytes = b""
    given_forward: bytes = b""
    given_backward: bytes = b""


class StageErrors(msgspec.Struct, frozen=True, array_like=True):
    """By how much another holder's results are off, of each token [t] (plan.trust.equality.measure_errors)."""

    forward: tuple[float, ...] = ()
    backward: tuple[float, ...] = ()


class StageComputed(Message, tag="stage_computed", frozen=True):
    """Worker to daemon: the payload is what goes forward or back, or ``StageErrors``; ``loss`` is the rows' sum.

    ``failure``: why it could not be computed of what came; nothing was added then.
    """

    loss: float = 0.0
    failure: Text = ""
    part: Part = (0, 1)


WorkerMessage = (
    LoadSpan
    | FollowTeam
    | Seated
    | Followed
    | Loaded
    | Loading
    | Improved
    | Measured
    | LoadAdapter
    | AdapterLoaded
    | Done
    | Tick
    | WorkerFailed
    | Ending
    | Rest
    | SetComputeShare
    | LoadRun
    | RunLoaded
    | MapRun
    | RunMapped
    | Compute
    | ComputeAgain
    | ComputedRows
    | ComputeStage
    | StageComputed
    | messages.Refusal
    | messages.OpenSession
    | messages.CloseSession
    | messages.Op
    | messages.Void
    | messages.Replay
    | messages.Replayed
    | messages.HandOver
    | messages.HandedOver
    | messages.CachePart
    | messages.Inherited
    | messages.WantTokens
    | messages.TokensAre
    | tuning.OpenLane
    | tuning.CloseLane
    | tuning.Forward
    | tuning.Backward
    | tuning.Gradients
    | tuning.PutTuned
    | tuning.TunedHeld
)

_decoder: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)


def decode(header: bytes) -> WorkerMessage:
    """Read one header between a daemon and its worker. Raises RemoteProtocolError."""
    try:
        return _decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"a header of the worker link does not parse: {error}") from None
