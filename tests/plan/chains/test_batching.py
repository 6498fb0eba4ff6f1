"""What a worker computes next, decided without a tensor."""

from __future__ import annotations

from swarmd.plan.chains.batching import (
    MAX_TOKENS_PER_PASS,
    MIN_CHUNK_TOKENS,
    MIN_TOKENS_BETWEEN,
    MOST_TOKENS_OF_CARD,
    PassShare,
    ReadyOp,
    Speed,
    can_admit_steps,
    choose_pass,
    choose_steps,
    patience_s,
    tokens_of_op,
)

SPEED = Speed(decode_pass_s=0.01, prefill_token_s=0.0002)


def ready(name: str, t: int = 1, *, client: str = "", order: int = 0, share: bool = True, b: int = 1) -> ReadyOp:
    return ReadyOp((name.encode(), 0), (client or name).encode(), b, t, order, share)


def keys(*items: ReadyOp, served: dict[bytes, float] | None = None) -> list[str]:
    return [s.key[0].decode() for s in choose_pass(items, served or {}, SPEED).action]


def test_all_ready_decode_steps_share_a_pass() -> None:
    assert keys(ready("a"), ready("b"), ready("c", 4)) == ["a", "b", "c"]


def test_prefill_beside_decoding_adds_half_a_pass_at_most() -> None:
    shares = choose_pass([ready("a"), ready("long", 4_000)], {}, SPEED).action
    assert shares == (PassShare((b"a", 0), 1), PassShare((b"long", 0), 25))


def test_prefill_alone_takes_whole_passes() -> None:
    (share,) = choose_pass([ready("long", 4_000, b=4)], {}, SPEED).action
    assert share.t * 4 == MAX_TOKENS_PER_PASS


def test_where_tokens_take_a_card_no_time_a_prompts_pass_is_long() -> None:
    card = Speed(decode_pass_s=0.005, prefill_token_s=0.00004)
    for prefill, n_tokens in (
        (ready("long", 4_000), 1_250),
        (ready("wide", 4_000, b=4), 312),
        (ready("exact", 4_000, share=False), MAX_TOKENS_PER_PASS),
    ):
        (share,) = choose_pass([prefill], {}, card, most_tokens=MOST_TOKENS_OF_CARD).action
        assert share.t == n_tokens
    for most_tokens in (MAX_TOKENS_PER_PASS, MOST_TOKENS_OF_CARD):
        (share,) = choose_pass([ready("long", 4_000)], {}, Speed(0.005, 0.0), most_tokens=most_tokens).action
        assert share.t == most_tokens


def test_between_the_steps_of_others_prefill_takes_short_passes() -> None:
    (share,) = choose_pass([ready("long", 4_000)], {}, SPEED, n_active=1).action
    assert share.t == MIN_TOKENS_BETWEEN, "25 would be bearable, and are not worth a pass"
    quick = Speed(SPEED.decode_pass_s, SPEED.prefill_token_s / 4)
    (share,) = choose_pass([ready("long", 4_000)], {}, quick, n_active=1).action
    assert share.t == 100


def test_a_prompts_pass_that_lets_steps_in_needs_not_take_them_along() -> None:
    decision = choose_pass([ready("a"), ready("long", 4_000)], {}, SPEED, n_active=1, admits_steps=True)
    assert decision.action == (PassShare((b"long", 0), MIN_TOKENS_BETWEEN),)
    assert keys(ready("a"), ready("b")) == ["a", "b"], "where no prompt waits nothing changes"


def test_a_call_takes_as_many_steps_as_it_is_for_and_the_oldest_first() -> None:
    steps = [ready("new", 2, order=3), ready("old", 3, order=1), ready("wide", 4, order=2)]
    assert [share.key[0] for share in choose_steps(steps, 6)] == [b"old", b"new"]
    assert [share.t for share in choose_steps(steps, 16)] == [3, 4, 2]
    assert choose_steps(steps, 1) == ()


def test_a_prompts_pass_has_a_third_of_the_time_beside_steps_that_it_lets_in() -> None:
    assert can_admit_steps(step_s=0.0, pass_s=0.0)
    assert can_admit_steps(step_s=0.2, pass_s=0.1)
    assert not can_admit_steps(step_s=0.2, pass_s=0.09)


def test_prefill_always_moves_on() -> None:
    slow = Speed(decode_pass_s=0.001, prefill_token_s=0.1)
    shares = choose_pass([ready("a"), ready("long", 4_000)], {}, slow).action
    assert shares[1].t == MIN_CHUNK_TOKENS


def test_one_prefill_at_a_time_and_the_least_served_client_first() -> None:
    waiting = [ready("greedy", 4_000, order=1), ready("modest", 4_000, order=2)]
    assert keys(*waiting) == ["greedy"]
    assert keys(*waiting, served={b"greedy": 512.0}) == ["modest"]


def test_the_rest_of_a_begun_prefill_is_no_decode_step() -> None:
    rest = ReadyOp((b"long", 0), b"c", 1, 3, 0, True, None, is_begun=True)
    assert not rest.is_decode


def test_sessions_that_cannot_share_take_turns_with_those_that_can() -> None:
    exact, others = ready("exact", share=False), [ready("a", order=1), ready("b", order=2)]
    assert keys(exact, *others) == ["exact"]
    assert keys(exact, *others, served={b"exact": 1.0}) == ["a", "b"]


def test_a_prefill_that_cannot_share_waits_for_its_turn_and_gets_it() -> None:
    exact, decoding = ready("exact", 400, share=False), ready("a", order=1)
    assert keys(exact, decoding, served={b"exact": 9.0}) == ["a"]
    assert keys(exact, decoding, served={b"exact": 9.0, b"a": 10.0}) == ["exact"]


def test_hops_of_different_blocks_do_not_share() -> None:
    one, other = ready("a"), ReadyOp((b"b", 4), b"b", 1, 1, 1, True, "other blocks")
    assert keys(one, other) == ["a"]
    assert keys(one, other, served={b"a": 1.0}) == ["b"]


def test_a_prompt_is_cut_so_that_all_hops_work_at_the_same_time() -> None:
    assert tokens_of_op(8, 128, [2_500.0, 2_600.0]) == 16
    assert tokens_of_op(1, 4_000, [1e6, 1e6]) == 2_000
    assert tokens_of_op(1, 12, [2_500.0, 2_500.0]) == 12
    assert tokens_of_op(1, 6_400, [100.0, 100.0]) == 64
    assert tokens_of_op(1, 6_400, [100.0, 100.0], n_members=3) == 208, "in blocks of 16"
    assert tokens_of_op(8, 128, [2_500.0]) == 128
    assert tokens_of_op(600, 1, [10.0, 10.0]) == 1


def test_an_idle_worker_waits_for_half_of_those_that_decode_and_never_long() -> None:
    assert patience_s(n_ready=1, n_active=1, waited_s=0.0, speed=SPEED) == 0
    assert patience_s(n_ready=1, n_active=2, waited_s=0.0, speed=SPEED) == 0
    assert patience_s(n_ready=1, n_active=16, waited_s=0.0, speed=SPEED) == SPEED.decode_pass_s / 2
    assert patience_s(n_ready=8, n_active=16, waited_s=0.0, speed=SPEED) == 0
    assert patience_s(n_ready=1, n_active=16, waited_s=1.0, speed=SPEED) == 0
    assert patience_s(n_ready=0, n_active=16, waited_s=0.0, speed=SPEED) == 0
