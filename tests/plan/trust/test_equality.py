"""What counts as equal, how often servers are checked, and whom their peers trust."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmd.plan.trust.audits import ALWAYS_BELOW, LEAST_RATE, AuditRecord, audit_rate, is_due, next_window
from swarmd.plan.trust.equality import AuditVerdict, bound_of, is_equal, measure_errors, project_tokens, two_of_three
from swarmd.plan.trust.reputation import (
    OTHERS_TURN_S,
    Trust,
    choose_probes,
    count_speakers,
    make_finding,
    name_of,
    rate_servers,
    shared_blocks,
)
from swarmd.protocol.membership.records import PeerRecord, SpanRecord
from swarmd.values import PeerId, Span

RNG = np.random.default_rng(0)
ENTERED = RNG.standard_normal((2, 6, 64), dtype=np.float32)
LEFT = ENTERED + RNG.standard_normal((2, 6, 64), dtype=np.float32)
FLOAT32 = bound_of("float32", "none")


def test_an_error_is_relative_to_what_the_span_added_and_the_worst_rows() -> None:
    wrong = LEFT.copy()
    wrong[1, 3] += 0.1 * (LEFT - ENTERED)[1, 3]
    found = measure_errors(ENTERED, wrong, LEFT, FLOAT32)
    assert found[3] == pytest.approx(0.1, rel=1e-3)
    assert not found[[0, 1, 2, 4, 5]].any()
    assert not is_equal(found, FLOAT32).action
    assert is_equal(measure_errors(ENTERED, LEFT * np.float32(1 + 1e-6), LEFT, FLOAT32), FLOAT32).action


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_never_equal(value: float) -> None:
    wrong = LEFT.copy()
    wrong[0, 2, 5] = value
    assert not is_equal(measure_errors(ENTERED, wrong, LEFT, FLOAT32), bound_of("bfloat16", "int8")).action


def test_a_span_that_adds_nothing_is_no_division_by_zero() -> None:
    assert measure_errors(ENTERED, ENTERED, ENTERED, FLOAT32).max() == 0
    assert not is_equal(measure_errors(ENTERED, LEFT, ENTERED, FLOAT32), FLOAT32).action


def test_a_projection_shows_the_same_errors_within_a_factor_of_two() -> None:
    entered = RNG.standard_normal((1, 200, 576), dtype=np.float32)
    again = entered + RNG.standard_normal(entered.shape, dtype=np.float32)
    left = again + np.float32(0.01) * RNG.standard_normal(entered.shape, dtype=np.float32)
    whole = np.median(measure_errors(entered, left, again, FLOAT32))
    small = np.median(measure_errors(*(project_tokens(values, 5) for values in (entered, left, again)), FLOAT32))
    assert whole / 2 < small < whole * 2


def test_in_half_precision_single_tokens_may_go_another_way_and_a_tenth_may_not() -> None:
    bound = bound_of("bfloat16", "none")
    found = np.full(100, 0.01, np.float32)
    found[:5] = 0.3  # an expert chosen otherwise
    assert is_equal(found, bound).action
    found[:12] = 0.1
    assert not is_equal(found, bound).action
    assert is_equal(found[:10], bound).action, "of so few nothing follows"
    found[:12] = 0.01
    found[50] = 0.6
    assert not is_equal(found, bound).action


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        ((True, None, None), AuditVerdict.RIGHT),
        ((False, None, None), AuditVerdict.UNDECIDED),
        ((False, False, True), AuditVerdict.WRONG),
        ((False, True, False), AuditVerdict.REFERENCE_WRONG),
        ((False, False, False), AuditVerdict.UNDECIDED),
        ((False, True, True), AuditVerdict.UNDECIDED),
    ],
)
def test_two_against_one(answers: tuple[bool, bool | None, bool | None], verdict: AuditVerdict) -> None:
    assert two_of_three(*answers) is verdict


@given(st.integers(0, 10**6))
def test_the_rate_falls_and_never_ends(n_right: int) -> None:
    p = audit_rate(AuditRecord(n_right, n_right))
    assert p == 1 if n_right < ALWAYS_BELOW else LEAST_RATE <= p <= 1 / n_right or p == LEAST_RATE
    assert not is_due(AuditRecord(n_right, n_right), 1.0 - 1e-9, 0.5).action or p == 1


def test_a_wrong_one_begins_anew() -> None:
    record = AuditRecord()
    for _ in range(100):
        record = record.after(is_right=True)
    assert audit_rate(record) == LEAST_RATE
    assert audit_rate(record.after(is_right=False)) == 1.0
    assert record.after(is_right=False).n_wrong == 1


def test_windows_double() -> None:
    ends, n_ops = [], 0
    while n_ops < 1_000:
        n_ops = next_window(n_ops)
        ends.append(n_ops)
    assert ends == [32, 64, 128, 256, 512, 1024]


# --- what holders say of each other ----------------------------------------------------------------------------


def span(peer: str, start: int, end: int, **more: object) -> SpanRecord:
    rest = {"state": "online", "numerics": f"of {peer}", **more}
    return SpanRecord(
        peer=peer, sequence=1, issued_at=0, expires_at=9, certificate=(), model="m", start=start, end=end, **rest
    )  # type: ignore[arg-type]


def peer(name: str, *found: object) -> PeerRecord:
    return PeerRecord(peer=name, sequence=1, issued_at=0, expires_at=9, certificate=(), found=found)  # type: ignore[arg-type]


def own_voucher(peer: PeerId) -> bytes:
    return peer.encode()


A, B, C = span("a", 0, 4), span("b", 2, 6), span("c", 2, 6)


def test_only_what_is_alike_is_compared() -> None:
    assert shared_blocks(A, B) == Span(2, 4)
    assert shared_blocks(A, A) is None
    assert shared_blocks(A, span("b", 4, 6)) is None
    assert shared_blocks(A, span("b", 2, 6, dtype="bfloat16")) is None
    assert shared_blocks(A, span("b", 2, 6, quantize="int8")) is None


def test_everybody_is_probed_by_two_others_and_strangers_come_first() -> None:
    spans = [span(chr(97 + n), 0, 4) for n in range(6)]
    kin = {"a": b"x", "b": b"x", "c": b"x"}
    probed = [
        (target.peer, mine.peer)
        for s in spans
        for target, mine in choose_probes(PeerId(s.peer), spans, lambda p: kin.get(p, p.encode()), {}, 0.0)
    ]
    assert len(probed) == 12
    assert not [pair for pair in probed if set(pair) <= {"a", "b", "c"}]


def test_a_probe_is_done_again_after_an_hour_and_after_each_load() -> None:
    done = {("b", name_of(B)): 100.0}
    assert choose_probes(PeerId("a"), [A, B], own_voucher, done, 200.0) == []
    assert [t.peer for t, _ in choose_probes(PeerId("a"), [A, B], own_voucher, done, 4_000.0)] == ["b"]
    loaded = span("b", 2, 6, numerics="others")
    assert [t.peer for t, _ in choose_probes(PeerId("a"), [A, loaded], own_voucher, done, 200.0)] == ["b"]


def test_who_holds_blocks_in_records_only_does_not_keep_others_from_probing() -> None:
    """Two that never probe may come first for a server: a minute later the next in order has its turn, and so on."""
    spans = [span(chr(97 + n), 0, 4) for n in range(6)]
    target = spans[5]

    def probers(unsaid_s: float) -> set[str]:
        unsaid = {(target.peer, name_of(target)): unsaid_s}
        due = {s.peer: choose_probes(PeerId(s.peer), spans, own_voucher, {}, 0.0, unsaid) for s in spans[:5]}
        return {peer for peer, found in due.items() if target.peer in {t.peer for t, _ in found}}

    first, then = probers(0.0), probers(OTHERS_TURN_S)
    assert (len(first), len(then)) == (2, 3)
    assert first < then
    assert len(probers(10 * OTHERS_TURN_S)) == 5
    said = [peer("a", make_finding(target, True)), peer("f", make_finding(target, True)), peer("b")]
    assert count_speakers(spans, said)["f", name_of(target)] == 1


def test_trust_follows_what_others_found() -> None:
    said = [peer("a", make_finding(B, True), make_finding(C, False)), peer("b"), peer("c", make_finding(C, True))]
    trust = rate_servers([A, B, C], said, own_voucher)
    assert trust == {("a", 0): Trust.UNKNOWN, ("b", 0): Trust.PROVEN, ("c", 0): Trust.UNKNOWN}, "one word is no proof"
    said.append(peer("d", make_finding(C, False)))
    assert rate_servers([A, B, C], said, own_voucher)["c", 0] is Trust.UNKNOWN, "who serves nothing computed nothing"
    assert rate_servers([A, B, C, span("d", 0, 4)], said, own_voucher)["c", 0] is Trust.DOUBTED
    assert rate_servers([A, B, C], [peer("a")], own_voucher) == {}, "nobody said anything"


def test_who_holds_blocks_alone_is_not_held_back() -> None:
    alone = span("d", 10, 12)
    assert rate_servers([A, B, alone], [peer("a", make_finding(B, True))], own_voucher)["d", 0] is Trust.PROVEN


def test_many_of_one_voucher_are_one_voice() -> None:
    accusers = [peer(name, make_finding(B, False)) for name in "xyz"]
    trust = rate_servers(
        [A, B], [*accusers, peer("a", make_finding(B, True))], lambda p: b"one" if p in "xyz" else p.encode()
    )
    assert trust["b", 0] is Trust.PROVEN


def test_whose_guests_are_wrong_again_and_again_vouches_for_nobody() -> None:
    wrong = [span(f"gone {n}", 0, 4) for n in range(3)]
    said = [peer(name, *(make_finding(s, False, b"leaky invite") for s in wrong)) for name in ("a", "b")]
    newcomer = span("new", 0, 4)
    vouchers = {"new": b"leaky invite"} | {s.peer: b"leaky invite" for s in wrong}

    def voucher_of(p: PeerId) -> bytes:
        return vouchers.get(p, p.encode())

    assert rate_servers([A, B, newcomer], said, voucher_of)["new", 0] is Trust.DOUBTED
    assert rate_servers([A, B, newcomer], said[:1], voucher_of)["new", 0] is Trust.UNKNOWN, "one member's word"
    unknown = [
        peer(name, *(make_finding(span(f"made up {n}", 0, 4), False, b"leaky invite") for n in range(3)))
        for name in "ab"
    ]
    assert rate_servers([A, B, newcomer], unknown, voucher_of)["new", 0] is Trust.UNKNOWN, (
        "of peers that nobody has seen"
    )
    fewer = [peer(name, *(make_finding(s, False, b"leaky invite") for s in wrong[:2])) for name in ("a", "b")]
    assert rate_servers([A, B, newcomer], fewer, voucher_of)["new", 0] is Trust.UNKNOWN, "two may have bad memory"


def test_two_members_words_do_not_have_all_others_doubted() -> None:
    """They serve, too, and call every honest server wrong, each of which two others have probed."""
    honest = [span(name, 0, 4) for name in "abcd"]
    hostile = [span(name, 0, 4) for name in ("liar", "second", "third")]
    said = [peer(name, *(make_finding(s, True) for s in honest if s.peer != name)) for name in "ab"]
    said += [peer(s.peer, *(make_finding(h, False) for h in honest)) for s in hostile]
    trust = rate_servers([*honest, *hostile], said, own_voucher)
    assert {trust[s.peer, 0] for s in honest[2:]} == {Trust.PROVEN}, "two probes"
    assert Trust.DOUBTED not in {trust[s.peer, 0] for s in honest}
    said += [peer(name, make_finding(hostile[0], False)) for name in "cd"]
    assert rate_servers([*honest, *hostile], said, own_voucher)["liar", 0] is Trust.DOUBTED
