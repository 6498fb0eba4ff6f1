"""Headers of training together: runs and commits, how a round forms, its parts, its anchors. docs/protocol.md."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from swarmd.protocol.fields import Count, Digest, Message, Name, Request, SessionKey, Stage, Text
from swarmd.protocol.runs.backing import ContributionShare, Sums
from swarmd.protocol.runs.commit import MAX_CONTRIBUTORS, Ballot, Finite, Size

Rate = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
Element = Annotated[int, msgspec.Meta(ge=0, le=2**48)]
Range = tuple[Element, Element]
Version = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Place = Annotated[int, msgspec.Meta(ge=0, lt=MAX_CONTRIBUTORS)]
MAX_PARTS = 1_024  # of a group: several for each member, after some were lost
MAX_NEAR = 64  # members of one site that a member names


class WantRun(Request, tag="want_run", frozen=True):
    """What is this run? The answer's payload is (signed recipe, its owner's latest order or b"")."""

    run: Name = ""


class RunIs(Message, tag="run", frozen=True):
    """The answer to a ``WantRun``."""

    re: Count = 0


class WantCommits(Request, tag="want_commits", frozen=True):
    """Give me the commits after update ``after``; the answer's payload is a list of them, in order."""

    run: Name = ""
    after: Count = 0


class Commits(Message, tag="commits", frozen=True):
    """Signed commits, asked for (``re``) or news: the payload is a list of them, in order."""

    re: Count = 0
    run: Name = ""


class WantState(Request, tag="want_state", frozen=True):
    """Keep the present state as it is for a while, so that I can fetch it: answered by ``StateIs``."""

    run: Name = ""


class StateIs(Message, tag="state", frozen=True):
    """The update of the state that is kept, and the hash of its manifest: chunks are asked for by that."""

    re: Count = 0
    epoch: Count = 0
    state: Digest = b""


class Prepare(Request, tag="prepare", frozen=True):
    """Proposer to anchor: promise to take nothing under a lower ballot after this parent."""

    run: Name = ""
    parent: Digest = b""
    ballot: Ballot = (0, "")


class Promised(Message, tag="promised", frozen=True):
    """The highest ballot that is promised now: the one asked for, if that is a yes.

    Under ``accepted`` the commit in the payload, with its backing, was taken before, and signed.
    """

    re: Count = 0
    promised: Ballot = (0, "")
    accepted: Ballot = (0, "")
    signature: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


class Propose(Request, tag="propose", frozen=True):
    """Proposer to anchor: sign the commit in the payload, which comes with its backing, under this ballot."""

    run: Name = ""
    ballot: Ballot = (0, "")


class Accepted(Message, tag="accepted", frozen=True):
    """The anchor's signature; without one the commit was not taken, since a higher ballot is ``promised``."""

    re: Count = 0
    promised: Ballot = (0, "")
    signature: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


class JoinRound(Request, tag="join_round", frozen=True):
    """Member to leader: take me into the round after this commit, with what I have gathered.

    ``n`` samples from draw ``first``, ``loss`` is the sum of theirs, ``state`` the hash of the state that they were
    computed on, but for the first ``late`` of them, which were computed on the one before. ``anew``: see Commit. With
    no samples it only reduces, or only ``receives`` the average. ``near``: members at the same site, as it measured.
    """

    run: Name = ""
    parent: Digest = b""
    state: Digest = b""
    first: Count = 0
    n: Count = 0
    loss: Finite = 0.0
    n_elements: Element = 0
    dtype: Name = "float32"
    receives: bool = True
    can_reduce: bool = True
    up_bytes_per_s: Rate | None = None
    down_bytes_per_s: Rate | None = None
    late: Count = 0
    anew: bool = False
    near: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_NEAR)] = ()


class Joined(Message, tag="joined", frozen=True):
    """The leader has noted it; a ``Group`` will follow, and a ``Pulse`` now and then until then."""

    re: Count = 0


class GroupMember(msgspec.Struct, frozen=True, array_like=True):
    """One peer of a group: its draws, whether it gets results, and whether its contribution is summed.

    ``row``, and whether it may stand between others (``collects``): for the group's topology.
    """

    peer: Name
    first: Count
    n: Count
    receives: bool
    is_counted: bool = True
    row: Place = 0
    collects: bool = True


class GroupPart(msgspec.Struct, frozen=True, array_like=True):
    """Elements [start, end) of the vector, reduced by the member at ``reducer``."""

    reducer: Place
    start: Element
    end: Element


class Group(Message, tag="group", frozen=True):
    """Leader to all: who is in the round, who reduces what. A higher version replaces a lower one.

    Contributions stay valid from version to version, subtotals and results do not. Order of ``members`` is the order of
    the sums; ``topology`` says by which way they come together (plan.runs.topology).
    """

    run: Name = ""
    round: SessionKey = b"\0" * 16
    version: Version = 0
    parent: Digest = b""
    n_elements: Element = 0
    dtype: Name = "float32"
    members: Annotated[tuple[GroupMember, ...], msgspec.Meta(max_length=MAX_CONTRIBUTORS)] = ()
    parts: Annotated[tuple[GroupPart, ...], msgspec.Meta(max_length=MAX_PARTS)] = ()
    expected_s: Rate = 0.0
    topology: Literal["parts", "rows", "ring"] = "parts"


class Contribution(Message, tag="contribution", frozen=True):
    """Member to parent: what it gives to a part (first element, end) from element ``start`` on.

    The payload is as the recipe's codec writes it.
    """

    run: Name = ""
    round: SessionKey = b"\0" * 16
    part: Range = (0, 0)
    start: Element = 0
    n_elements: Element = 0


class Subtotal(Message, tag="subtotal", frozen=True):
    """Member to parent: what all below it and itself give to a part, in one version of the group.

    The payload is the sum; where the recipe's codec forwards contributions, those, one after the other.
    """

    run: Name = ""
    round: SessionKey = b"\0" * 16
    version: Version = 0
    part: Range = (0, 0)
    start: Element = 0
    n_elements: Element = 0


class Reduced(Message, tag="reduced", frozen=True):
    """Parent to members: the average from element ``start`` on, as its reducer made it, in one version of the group."""

    run: Name = ""
    round: SessionKey = b"\0" * 16
    version: Version = 0
    start: Element = 0
    n_elements: Element = 0


class Received(msgspec.Struct, frozen=True, array_like=True):
    """What a parent has of one member: elements; once all are there, the sum of their squares, or what is wrong.

    Once it has the average: what those elements come to along its directions (train.vectors.directions).
    """

    member: Place
    n_elements: Element
    squares: Size | None = None
    fault: Annotated[str, msgspec.Meta(max_length=200)] = ""
    sums: Sums = ()


class Gave(msgspec.Struct, frozen=True, array_like=True):
    """What a member gave to one parent: the sum of squares; once it has the average, sums along its directions."""

    parent: Place
    squares: Size | None = None
    sums: Sums = ()


class Reduction(msgspec.Struct, frozen=True, array_like=True):
    """What a member has of the parts of one reducer: elements of results, or what is wrong with them.

    Once it has the whole average: the first bytes of the results' SHA-256. What they come to along the directions
    (``total``), within ``rounding``, a leader only tells itself.
    """

    reducer: Place
    n_elements: Element
    fault: Annotated[str, msgspec.Meta(max_length=200)] = ""
    digest: Annotated[bytes, msgspec.Meta(max_length=16)] = b""
    total: Sums = ()
    rounding: Size = 0.0


class Beat(Message, tag="beat", frozen=True):
    """Member to leader, twice a second: I am at it. ``result``: the hash of the average, once it is all there.

    ``n_elements`` are here of all that is waited for; the lists are of what is whole or faulty. ``received`` and
    ``gave``: of members' own numbers, those that it keeps included; ``subtotals`` and ``passed``: of what comes from,
    and goes to, others by way of this member. With the result comes the member's signed share; and once the leader has
    shown it everybody's, its assent (``Check``).
    """

    run: Name = ""
    round: SessionKey = b"\0" * 16
    version: Version = 0
    received: Annotated[tuple[Received, ...], msgspec.Meta(max_length=MAX_CONTRIBUTORS)] = ()
    subtotals: Annotated[tuple[Received, ...], msgspec.Meta(max_length=MAX_CONTRIBUTORS)] = ()
    gave: Annotated[tuple[Gave, ...], msgspec.Meta(max_length=MAX_CONTRIBUTORS)] = ()
    passed: Annotated[tuple[Gave, ...], msgspec.Meta(max_length=MAX_CONTRIBUTORS)] = ()
    reductions: Annotated[tuple[Reduction, ...], msgspec.Meta(max_length=MAX_CONTRIBUTORS)] = ()
    result: Digest = b""
    share: ContributionShare | None = None
    assent: Annotated[bytes, msgspec.Meta(max_length=64)] = b""
    n_elements: Element = 0


class Check(Message, tag="check", frozen=True):
    """Leader to contributors: do you stand for the commit in the payload, with these shares? (protocol.runs.backing).

    Without a payload: sign your share of this ``average``, though you have not got all of it.
    """

    run: Name = ""
    round: SessionKey = b"\0" * 16
    version: Version = 0
    average: Digest = b""


class Pulse(Message, tag="pulse", frozen=True):
    """Leader to members and, before it has begun, to those it expects, twice a second: I am at it, and for what I wait.

    ``retry_ms``: too few samples are there, go on computing for so long. ``successor`` leads instead; a member
    says so, too, when it goes over to that one. ``is_awaited``: the receiver has not joined what is gathered now.
    """

    run: Name = ""
    parent: Digest = b""
    waits_for: Text = ""
    retry_ms: Count | None = None
    successor: Name = ""
    is_awaited: bool = False


class Contradict(Message, tag="contradict", frozen=True):
    """Member to all: I computed again what ``peer`` gave to the commit after ``parent``, and something else came of it.

    The payload is its share, which it has signed; the state that it was computed on can be had from me. In a run in
    stages it goes to drivers, too: ``run`` is their ledger then, and ``stage`` and ``update`` name the commit.
    """

    run: Name = ""
    peer: Name = ""
    parent: Digest = b""
    stage: Stage | None = None
    update: Count = 0
