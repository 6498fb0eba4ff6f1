"""Audits: who computes wrongly is found by what others compute, and nobody else is."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest
import torch
import trio
from trio.testing import MockClock

from swarmd.client.links.link import HopLink
from swarmd.client.links.ops import StepInput
from swarmd.client.sessions.accuse import evidence_of
from swarmd.client.sessions.hop_audit import record_key
from swarmd.client.sessions.receipts import HopAccount
from swarmd.client.sessions.session import ChainSession
from swarmd.client.sessions.verify import merge_cropped
from swarmd.client.swarm import AsyncSwarm
from swarmd.errors import Code, Refused, Unreachable, WrongAnswer
from swarmd.net.standing import Standing
from swarmd.node.serving.receipts import Receipts
from swarmd.plan.chains.routing import Hop
from swarmd.plan.trust.audits import FIRST_WINDOW_OPS, AuditRecord
from swarmd.plan.trust.reputation import Trust
from swarmd.plan.trust.standing import Fault
from swarmd.protocol.accounts import evidence
from swarmd.protocol.accounts.evidence import Evidence
from swarmd.protocol.wire.messages import Accuse, Edit, TokensAre, WantTokens
from swarmd.values import PeerId, Span
from swarmd.wire.history import SentOp
from swarmd.wire.tensors import unpack_untrusted
from tests.sim.swarm import HIDDEN, Reference, SimSwarm

HALVES = (Span(0, 3), Span(3, 6))


def sometimes(
    lie: Callable[[torch.Tensor], torch.Tensor],
    *tokens: int,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A lie about these of the tokens that come one by one, the first is 0."""
    n = itertools.count()

    def compute(out: torch.Tensor) -> torch.Tensor:
        is_decode = out.shape[1] == 1
        return lie(out) if is_decode and next(n) in tokens else out

    return compute


class Chat:
    """A session through two hops, the first of ``peers`` for each half; others hold the same blocks."""

    def __init__(
        self,
        swarm: SimSwarm,
        peers: list[PeerId],
        client: AsyncSwarm,
        session: ChainSession,
    ) -> None:
        self.swarm = swarm
        self.peers = peers
        self.client = client
        self.session = session
        self.n_wrong = 0
        self._n = 0
        self._reference = Reference(6)
        self._hidden = torch.randn(1, 5, HIDDEN, generator=torch.Generator().manual_seed(1))

    async def generate(self, n_tokens: int) -> None:
        for _ in range(n_tokens):
            n_new = self._hidden.shape[1]
            positions = torch.arange(self._n, self._n + n_new, dtype=torch.int32).unsqueeze(0)
            self._n += n_new
            out = await self.session.step(StepInput(self._hidden, positions))
            assert out is not None
            expected = self._reference.step(self._hidden)
            self.n_wrong += not torch.equal(out[:, -1:], expected[:, -1:])
            self._hidden = out[:, -1:]

    def outcomes(self) -> list[str]:
        return [finding.outcome for finding in self.client.checks.findings]

    def faults(self, kind: Fault) -> list[int]:
        """How often each of the peers was found at fault."""
        return [self.client.rpc.standing.count(peer, kind) for peer in self.peers]


@asynccontextmanager
async def chat(
    *spans: Span,
    is_pinned: bool = True,
    only: tuple[int, ...] = (),
    verify: float = 0.0,
    codec: str = "raw",
) -> AsyncIterator[Chat]:
    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            swarm = SimSwarm(nursery, 6, seed=3)
            peers = [await swarm.add(span) for span in spans]
            client = await swarm.client()
            while len(client.view().serving(swarm.model)) < len(spans):
                await trio.sleep(0.5)
            route = tuple(Hop(peers[spans.index(half)], half) for half in HALVES)
            readers = frozenset(peers[place] for place in only)
            terms = replace(
                swarm.terms(256),
                route=route if is_pinned else (),
                only=readers,
                verify=verify,
                codec=codec,
            )
            session = await client.open_session(terms)
            yield Chat(swarm, peers, client, session)
            nursery.cancel_scope.cancel()


THREE = (*HALVES, *HALVES, *HALVES)


async def test_honest_servers_are_found_right(virtual_time: MockClock) -> None:
    async with chat(*THREE) as run:
        await run.generate(FIRST_WINDOW_OPS + 3)
        await run.client.close_session(run.session)
        assert run.outcomes() == ["right"] * 4, [f.reason for f in run.client.checks.findings]
        assert run.n_wrong == 0
        assert run.client.checks.n_served_tokens == 6 * (FIRST_WINDOW_OPS + 3 + 4)


@pytest.mark.parametrize("codec", ["float16", "int8"])
async def test_what_a_codec_loses_is_nobodys_lie(virtual_time: MockClock, codec: str) -> None:
    async with chat(*THREE, codec=codec) as run:
        await run.generate(FIRST_WINDOW_OPS + 3)
        await run.client.close_session(run.session)
        assert run.outcomes() == ["right"] * 4, [f.reason for f in run.client.checks.findings]


def receipts_of(run: Chat, place: int) -> Receipts:
    (hosting,) = run.swarm.daemons[run.peers[place]][0].hosts
    assert hosting.server is not None
    return hosting.server._receipts


@pytest.mark.parametrize("place", [0, 1])
async def test_who_signs_that_nothing_passed_is_done_without(virtual_time: MockClock, place: int) -> None:
    async with chat(*THREE) as run:
        receipts = receipts_of(run, place)
        sign_outputs = receipts.note_output
        receipts.note_output = lambda key, hop, seq, tensor, payload, n: sign_outputs(key, hop, seq, None, payload)  # type: ignore[method-assign]
        await run.generate(FIRST_WINDOW_OPS + 10)
        assert run.session.statistics.doubts
        assert run.peers[place] not in [link.hop.peer for link in run.session.chain.links]
        assert not any(run.faults(Fault.WRONG_RESULTS)), "one of two lies, and nobody knows which"


async def test_a_hop_that_has_signed_nothing_yet_proves_nothing(virtual_time: MockClock) -> None:
    """One that has just inherited caches: an audit at the session's end that met it ended the whole client."""
    async with chat(*THREE) as run:
        await run.generate(3)
        hops = run.session.chain
        ask_receipt = run.session.receipts.ask_receipt

        async def of_an_heir(link: HopLink) -> HopAccount:
            account = await ask_receipt(link)
            return HopAccount(last=account.last) if link is hops.links[1] else account

        run.session.receipts.ask_receipt = of_an_heir  # type: ignore[method-assign]
        await run.client.close_session(run.session)
        assert run.outcomes() == ["right", "inconclusive"]
        assert "signed nothing" in run.client.checks.findings[-1].reason
        assert not any(run.faults(Fault.UNACCOUNTED))


async def test_who_shows_nothing_again_and_again_loses_standing(virtual_time: MockClock) -> None:
    async with chat(*THREE) as run:
        receipts = receipts_of(run, 0)

        async def refuse(hop: object, request: object) -> None:
            raise Refused(Code.NO_CAPACITY, "not now")

        receipts.answer = refuse  # type: ignore[method-assign, assignment]
        await run.generate(FIRST_WINDOW_OPS * 2 + 3)
        await run.client.close_session(run.session)
        assert run.faults(Fault.UNACCOUNTED)[0] >= 1
        assert sum(run.faults(Fault.UNACCOUNTED)[1:]) == 0


async def test_a_liar_is_convicted_and_the_session_goes_on_rightly(virtual_time: MockClock) -> None:
    async with chat(*THREE) as run:
        run.swarm.workers[run.peers[0]].lie = sometimes(lambda out: out * 1.01, 5)
        await run.generate(FIRST_WINDOW_OPS - 1)
        assert run.faults(Fault.WRONG_RESULTS) == [0] * 6
        await run.generate(20)
        assert run.faults(Fault.WRONG_RESULTS) == [1, 0, 0, 0, 0, 0]
        (doubt,) = run.session.statistics.doubts
        assert doubt.first_token == 5 + 5, "of the tokens that follow a prompt of five, from the sixth on"
        assert run.peers[0] not in [link.hop.peer for link in run.session.chain.links]


async def silence_after(run: Chat, n_tokens: int) -> None:
    await run.generate(n_tokens)
    run.swarm.silence(run.peers[0])


@pytest.mark.parametrize("n_before", [4, FIRST_WINDOW_OPS + 8])
async def test_who_falls_silent_before_it_is_checked_leaves_a_doubt(virtual_time: MockClock, n_before: int) -> None:
    async with chat(*THREE) as run:
        if n_before < FIRST_WINDOW_OPS:
            run.swarm.workers[run.peers[0]].lie = sometimes(lambda out: out + 0.1, 0, 1, 2)
        await silence_after(run, n_before)
        await run.generate(6)
        (doubt,) = run.session.statistics.doubts
        assert "could be checked" in doubt.reason
        looked = 5 + FIRST_WINDOW_OPS - 1  # of a prompt of five, and what followed until the first look
        expected = {0} if n_before < FIRST_WINDOW_OPS else {looked - 1, looked}  # an op is under way then, or is not
        assert doubt.first_token in expected
        assert not any(run.faults(Fault.WRONG_RESULTS)), "that it was wrong is not known"


async def test_who_falls_silent_at_the_end_leaves_a_doubt(virtual_time: MockClock) -> None:
    async with chat(*THREE) as run:
        await silence_after(run, 6)
        await run.client.close_session(run.session)
        assert [doubt.first_token for doubt in run.session.statistics.doubts] == [0]


async def test_who_was_right_for_long_may_die_without_a_doubt(virtual_time: MockClock) -> None:
    async with chat(*THREE) as run:
        key = record_key(run.session.terms, run.session.chain.links[0].hop)
        run.client.checks._records[key] = AuditRecord(1_000, 1_000, 0)
        run.client.checks._rng.random = lambda: 0.5  # type: ignore[method-assign]
        await silence_after(run, 4)
        await run.generate(6)
        assert run.session.statistics.doubts == []


async def test_who_is_lost_before_it_gave_anything_leaves_none(virtual_time: MockClock) -> None:
    async with chat(*THREE) as run:
        await silence_after(run, 0)
        await run.generate(6)
        assert run.session.statistics.doubts == []


async def test_others_believe_what_they_compute_themselves(virtual_time: MockClock) -> None:
    async with chat(*THREE) as run:
        run.swarm.workers[run.peers[0]].lie = sometimes(lambda out: out * 1.01, 5)
        await run.generate(FIRST_WINDOW_OPS + 20)
        await trio.sleep(5)
        liar = run.peers[0]
        for place in (2, 4):
            daemon = run.swarm.daemons[run.peers[place]][0]
            assert daemon.rpc.standing.count(liar, Fault.WRONG_RESULTS) == 1
            findings = daemon.prober.record_findings()
            assert liar in [finding.peer for finding in findings if not finding.is_right]
        newcomer = await run.swarm.client()
        await trio.sleep(10)
        assert newcomer.trust()[liar, 0] is Trust.DOUBTED
        assert newcomer.trust()[run.peers[2], 0] is Trust.PROVEN


async def accuse_first_hop(
    run: Chat,
    change: Callable[[Evidence], Evidence] = lambda evidence: evidence,
) -> None:
    """Accuse the first hop, which is honest, of its fourth token, at another holder of its blocks. Raises PeerError."""
    link = run.session.chain.links[0]
    account = await run.session.receipts.ask_receipt(link)
    hidden, positions = run.session.history.placed(0, 4)
    request = WantTokens(session=run.session.key, first=3)
    shown, frame = await run.client.rpc.call(link.hop.peer, request)
    assert isinstance(shown, TokensAre)
    assert shown.tensor is not None
    outputs = unpack_untrusted(shown.tensor, frame.payload)[:2]
    payload = evidence_of(run.session.terms, account.signed, (hidden, positions), outputs)
    assert payload is not None
    changed = evidence.encode(change(msgspec.msgpack.decode(payload, type=Evidence)))
    accusation = Accuse(model=run.swarm.model, peer=link.hop.peer)
    await run.client.rpc.call(run.peers[2], accusation, changed, purpose="bulk")


def standing_of_judge(run: Chat) -> Standing:
    return run.swarm.daemons[run.peers[2]][0].rpc.standing


async def test_who_accuses_wrongly_loses_standing(virtual_time: MockClock) -> None:
    async with chat(*THREE) as run:
        await run.generate(3)
        await accuse_first_hop(run)
        assert standing_of_judge(run).count(run.client.identity.peer_id, Fault.FALSE_ACCUSATION) == 1
        assert standing_of_judge(run).count(run.peers[0]) == 0
        await accuse_first_hop(run)
        assert standing_of_judge(run).count(run.client.identity.peer_id, Fault.FALSE_ACCUSATION) == 2


def other_numbers(shown: Evidence) -> Evidence:
    meta, raw = shown.left
    return msgspec.structs.replace(shown, left=(meta, bytes(4) + raw[4:]))


def other_receipt(shown: Evidence) -> Evidence:
    body, signature = shown.receipts[0]
    return msgspec.structs.replace(shown, receipts=((body[:-1] + b"x", signature),))


def another_input(shown: Evidence) -> Evidence:
    meta, raw = shown.entered
    return msgspec.structs.replace(shown, entered=(meta, raw[:4] + bytes(4) + raw[8:]))


def other_positions(shown: Evidence) -> Evidence:
    meta, raw = shown.entered
    return msgspec.structs.replace(shown, entered=(meta, raw[:-4] + bytes(4)))


@pytest.mark.parametrize("change", [other_numbers, other_receipt, another_input, other_positions])
async def test_evidence_that_the_accused_did_not_sign_is_malformed(
    virtual_time: MockClock, change: Callable[[Evidence], Evidence]
) -> None:
    async with chat(*THREE) as run:
        await run.generate(3)
        with pytest.raises(Unreachable):
            await accuse_first_hop(run, change)
        assert standing_of_judge(run).count(run.client.identity.peer_id, Fault.MALFORMED) == 1
        assert standing_of_judge(run).count(run.peers[0]) == 0


async def test_nobody_is_accused_when_nobody_else_could_tell(virtual_time: MockClock) -> None:
    async with chat(*HALVES, *HALVES) as run:
        run.swarm.workers[run.peers[0]].lie = lambda out: out + 0.1
        await run.generate(FIRST_WINDOW_OPS + 1)
        await run.client.close_session(run.session)
        assert "undecided" in run.outcomes()
        assert run.faults(Fault.WRONG_RESULTS) == [0] * 4
        assert run.session.statistics.doubts


async def test_with_verify_the_answer_stops_at_the_first_wrong_token(virtual_time: MockClock) -> None:
    async with chat(*THREE, verify=1.0) as run:
        run.swarm.workers[run.peers[1]].lie = sometimes(lambda out: out * 1.01, 20)
        with pytest.raises(WrongAnswer) as error:
            await run.generate(60)
        assert error.value.first_token == 5 + 20
        assert run.session.statistics.steps < 60


async def test_with_verify_an_honest_answer_comes_to_its_end(virtual_time: MockClock) -> None:
    async with chat(*THREE, verify=1.0) as run:
        await run.generate(40)
        assert run.session.second is not None
        await run.session.second.finish()
        await run.client.close_session(run.session)
        assert run.n_wrong == 0


async def test_only_those_who_may_read_it_compute_it(virtual_time: MockClock) -> None:
    async with chat(*THREE, is_pinned=False, only=(2, 3)) as run:
        await run.generate(FIRST_WINDOW_OPS + 3)
        await run.client.close_session(run.session)
        assert {link.hop.peer for link in run.session.chain.links} == {run.peers[2], run.peers[3]}
        assert run.outcomes() == ["inconclusive"] * 4, "nobody else may see it, not even to check"


def test_what_was_cropped_again_is_left_out() -> None:
    def op(
        seq: int,
        n: int,
        crop: int = 0,
        rows: tuple[int, ...] | None = None,
    ) -> tuple[SentOp, torch.Tensor]:
        hidden = torch.full((1, n, 2), float(seq))
        positions = torch.zeros(1, n, dtype=torch.int32)
        edits = (Edit(crop=crop or None, rows=rows),) if crop or rows else ()
        return SentOp(seq, edits, hidden, positions, None), hidden * 10

    ((merged, out),) = merge_cropped([op(1, 5), op(2, 3, crop=2), op(3, 1, crop=1)])
    assert merged.hidden is not None
    assert merged.hidden[0, :, 0].tolist() == [1, 1, 1, 2, 2, 3]
    assert out[0, :, 0].tolist() == [10, 10, 10, 20, 20, 30]
    assert len(merge_cropped([op(1, 2), op(2, 1, crop=2)])) == 2, "what is cropped whole was checked before, or is now"
    assert len(merge_cropped([op(1, 2), op(2, 1, rows=(0,))])) == 2
