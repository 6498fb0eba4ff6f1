"""What a daemon says of training runs: rows and answers of the control API, as those of ``status``."""

from __future__ import annotations

from swarmd.status import Status


class RunPeerRow(Status, frozen=True, kw_only=True):
    """Another member of a run, by its own record."""

    peer: str
    role: str
    update: int
    samples: int
    samples_per_s: float
    status: str


class RoundRow(Status, frozen=True, kw_only=True):
    """How long the phases of a round took, in seconds, by which way its numbers came together, who was left out."""

    gather_s: float
    average_s: float
    commit_s: float
    n_members: int
    n_reducers: int
    expected_s: float
    topology: str
    left_out: tuple[str, ...]


class AuditsRow(Status, frozen=True, kw_only=True):
    """What members gave, computed again here: contributions, samples, how many were wrong.

    ``one_in``: the recipe's; ``why_not``: why nothing is computed again; ``trouble``: what others found in what this
    machine gave.
    """

    one_in: int
    why_not: str
    checked: int
    samples: int
    wrong: int
    trouble: str


class RunRow(Status, frozen=True, kw_only=True):
    """A training run that this daemon takes part in. Samples are rows of tokens; an update is an optimizer step.

    In a run of stages each that is here has a row; ``stage`` is its number, ``busy`` for which share of the last update
    it was computed.

    ``measured_samples_per_s``: counted ones of all, over the latest updates; ``predicted``: by the plan that was asked
    for last. ``device`` and ``worker`` are those of its training worker, ``failure`` is why it does not go on,
    ``finished`` why it has come to its end.
    """

    run: str
    name: str
    role: str
    state: str
    why: str
    update: int
    updates: int | None
    head: str
    state_update: int | None
    state_digest: str | None
    state_bytes: int | None
    parameters: int | None
    gathered: int
    target: int
    left_s: float | None
    samples_per_s: float
    anchors: tuple[str, ...]
    losses: tuple[float, ...]
    samples: int
    samples_gathered: int
    samples_counted: int
    samples_wasted: int
    average_here: float | None
    rounds_led: int
    rounds_failed: int
    last_round: RoundRow | None
    last_part_s: float | None
    catch_ups: int
    snapshots_fetched: int
    last_catch_up_s: float | None
    death_costs_at_most_s: float
    peers: tuple[RunPeerRow, ...]
    shunned: tuple[str, ...]
    audits: AuditsRow
    measured_samples_per_s: float | None = None
    predicted_samples_per_s: float | None = None
    device: str = ""
    worker: int | None = None
    failure: str = ""
    finished: str = ""
    stage: int | None = None
    stages: tuple[StageRow, ...] = ()
    busy: float | None = None


class StageRow(Status, frozen=True, kw_only=True):
    """One stage of a run: its blocks (the model's ends have none), how far it is, and who holds it.

    ``samples``: towards the next update, of all its holders; ``samples_per_s``: what they can compute together.
    """

    stage: int
    first_block: int | None
    end_block: int | None
    update: int
    samples: int
    holders: tuple[str, ...]
    samples_per_s: float = 0.0


class OtherRunRow(Status, frozen=True, kw_only=True):
    """A run of the swarm that this daemon takes no part in."""

    run: str
    name: str
    peers: int
    update: int


class RunsAnswer(Status, frozen=True, kw_only=True):
    """All runs of the swarm; ``training``: this machine\'s setting."""

    runs: tuple[RunRow, ...]
    others: tuple[OtherRunRow, ...]
    training: str


class PlanMemberRow(Status, frozen=True, kw_only=True):
    """Which part of the vector a member would reduce, and its links."""

    peer: str
    computes: bool
    reduces: float
    up_bytes_per_s: float | None
    down_bytes_per_s: float | None


class PlanSettingRow(Status, frozen=True, kw_only=True):
    """What a recipe with this setting would come to here: seconds of an update, the share of them that is computed.

    ``excess``: an update has so many times the samples that were asked for, as a round lasts longer than they take.
    """

    setting: str
    update_s: float
    utilisation: float
    excess: float
    samples_per_s: float
    bytes_per_sample: float


class PipelineRow(Status, frozen=True, kw_only=True):
    """What a run in stages comes to at most with its holders: samples/s, by its slowest stage.

    ``sample_bytes`` travel between holders for each sample, there and back; ``lacking``: stages without a holder.
    """

    stages: tuple[StageRow, ...]
    samples_per_s: float
    slowest: int | None
    lacking: tuple[int, ...]
    with_one_more: float
    sample_bytes: float


class PlanAnswer(Status, frozen=True, kw_only=True):
    """The next round as the linear program divides it; and what each synchronisation and codec would come to.

    Of a run in stages: ``pipeline``, and nothing else.
    """

    run: str
    bytes: int = 0
    expected_s: float = 0.0
    equal_parts_s: float = 0.0
    why: str = ""
    members: tuple[PlanMemberRow, ...] = ()
    setting: str = ""
    settings: tuple[PlanSettingRow, ...] = ()
    recommended: str = ""
    recommended_why: str = ""
    pipeline: PipelineRow | None = None


class JoinRunAnswer(Status, frozen=True, kw_only=True):
    """The run that was joined, and the part in it."""

    run: str
    name: str
    role: str
    stage: int | None = None


class PauseRunAnswer(Status, frozen=True, kw_only=True):
    """Whether the run rests on this machine now."""

    run: str
    paused: bool


class LeaveRunAnswer(Status, frozen=True, kw_only=True):
    """``lacks_anchors``: without this peer no majority of the run's anchors is there, and no update counts."""

    run: str
    left: bool
    name: str = ""
    lacks_anchors: bool = False


class OrderAnswer(Status, frozen=True, kw_only=True):
    """What the run\'s owner has ordered, and the anchors from then on."""

    run: str
    state: str
    anchors: tuple[str, ...]


class CheckpointAnswer(Status, frozen=True, kw_only=True):
    """Where a run's state was written, and its vector's layout: (name, shape) of each tensor.

    Of a run in stages ``stages`` has a state for each, and the rest is of no stage.
    """

    path: str
    layout: tuple[tuple[str, tuple[int, ...]], ...]
    update: int
    stages: tuple[StageState, ...] = ()


class StageState(Status, frozen=True, kw_only=True):
    """Where the state of one stage was written, and of which update it is."""

    stage: int
    path: str
    update: int
