"""What a scenario comes to: by formula where there is one, and the same for the same seed."""

from __future__ import annotations

import random

import msgspec
import pytest

from swarmd.plan.chains.routing import HOP_OVERHEAD_S
from swarmd.protocol.wire.tensors import token_bytes
from swarmd.train.synchronisation import codec_traffic
from swarmd.values import Span
from swarmd.whatif.answer import answer_scenario
from swarmd.whatif.clock import VirtualClock
from swarmd.whatif.geography import Geography, draw_line
from swarmd.whatif.presence import Stay
from swarmd.whatif.scenario import Habit, LinkKind, MachineKind, Scenario, ServedModel, TrainingScenario
from swarmd.whatif.servers import ServerPool
from swarmd.whatif.sessions import SUSPECT_AFTER_S, ModelledSessions
from swarmd.whatif.simulation import run_once
from tests.whatif.scenarios import CARD, LINE, MODEL, TALK, scenario


def change_card(**changes: object) -> MachineKind:
    return msgspec.structs.replace(CARD, **changes)


HERE = change_card(places={"here": 1.0})
TALK_HERE = msgspec.structs.replace(TALK, place="here", link="line")


def test_one_stream_on_one_server_takes_what_its_parts_take() -> None:
    answer = answer_scenario(scenario((HERE,), (msgspec.structs.replace(TALK_HERE, sessions_per_hour=3),)), {})
    assert answer.load is not None
    trip_s = (5 + 5 + 5) / 1e3  # both accesses, and the way within a place
    line_s = token_bytes(MODEL.hidden, "bfloat16", "raw") / (100e6 / 8)
    token_s = 8 * 2 / 1e3 + HOP_OVERHEAD_S + 2 * trip_s + 2 * line_s + TALK.client_ms / 1e3
    assert answer.load.tokens_per_s == pytest.approx((1 / token_s,) * 3, rel=0.01)
    assert answer.load.n_done == answer.load.n_begun > 0
    assert answer.models[0].served_share == 1.0
    assert answer.models[0].limits[-1].startswith("a token's time: ")


def test_a_far_user_waits_for_the_way() -> None:
    near = answer_scenario(scenario((HERE,), (TALK_HERE,)), {}).load
    far = answer_scenario(scenario((HERE,), (msgspec.structs.replace(TALK_HERE, place="there"),)), {}).load
    assert near is not None
    assert far is not None
    assert 1 / far.tokens_per_s[1] - 1 / near.tokens_per_s[1] == pytest.approx(0.07, rel=0.05)
    assert far.parts["trips"] > near.parts["trips"]


def test_many_streams_share_passes_and_go_slower() -> None:
    def tokens_per_s(sessions_per_hour: float) -> tuple[float, float]:
        talk = msgspec.structs.replace(TALK_HERE, sessions_per_hour=sessions_per_hour)
        run = run_once(scenario((HERE,), (talk,)), {}, 1)
        rates = sorted(run.tally.tokens_per_s)
        return rates[len(rates) // 2], run.tally.n_tokens

    alone, n_alone = tokens_per_s(20)
    crowd, n_crowd = tokens_per_s(2_000)
    assert crowd < alone
    assert n_crowd > 50 * n_alone, "a pass of many costs little more than one of one"


def test_the_same_seed_gives_the_same_answer_and_one_machine_more_changes_no_other() -> None:
    habit = Habit("comes and goes", stay_h=2, away_h=0.5, crashes=0.5)
    kind = change_card(count=6, habit=habit.name)
    asked = scenario((kind,), (TALK_HERE,), (habit,), hours=3)
    first, again = (run_once(asked, {}, 7) for _ in range(2))
    assert first.tally == again.tally
    assert run_once(asked, {}, 8).tally != first.tally
    more = run_once(scenario((msgspec.structs.replace(kind, count=7),), (TALK_HERE,), (habit,), hours=3), {}, 7)
    assert sum(more.n_leaves.values()) >= sum(first.n_leaves.values())


def test_sessions_survive_whoever_goes_while_blocks_have_holders() -> None:
    habit = Habit("comes and goes", stay_h=0.4, away_h=0.1, crashes=0.5)
    steady = change_card(count=2)
    guest = change_card(name="guest", count=6, habit=habit.name, block_ms=1, places={"here": 1.0})
    talk = msgspec.structs.replace(TALK_HERE, sessions_per_hour=400, new_tokens=1_000)
    asked = scenario((steady, guest), (talk,), (habit,), hours=3)
    tally = run_once(asked, {}, 3).tally
    assert tally.n_repairs > 20
    assert tally.n_lost == 0
    assert any(paused >= SUSPECT_AFTER_S for paused in tally.paused_s), "a crash is noticed by silence"


def test_without_holders_conversations_are_lost_and_said_so() -> None:
    habit = Habit("mornings", hours="0:00-1:30")
    answer = answer_scenario(scenario((change_card(habit=habit.name),), (TALK_HERE,), (habit,)), {})
    assert answer.load is not None
    assert answer.load.n_lost > 0
    assert answer.load.n_lost_while_held == 0
    assert 0 < answer.models[0].served_share < 1
    assert any("are held by nobody" in limit for limit in answer.models[0].limits)


@pytest.mark.parametrize(
    ("memory_gb", "said"),
    [(0.3, "not one block of 0.2 GB fits"), (1.0, "hold 2 of 8 blocks"), (5.0, "hold each block 1.0 times")],
)
def test_memory_that_lacks_is_the_first_limit(memory_gb: float, said: str) -> None:
    answer = answer_scenario(scenario((change_card(memory_gb=memory_gb),)), {})
    assert said in answer.models[0].limits[0]
    assert (answer.models[0].served_share == 1.0) == (memory_gb == 5.0)


def test_a_second_model_is_served_by_who_may_choose() -> None:
    other = ServedModel("other", blocks=4, block_parameters=1e8, hidden=1024, cache_numbers=1024)
    bound = change_card(count=2, serves="toy")
    answer = answer_scenario(scenario((bound, change_card(name="free", count=1)), models=(MODEL, other)), {})
    assert [model.served_share for model in answer.models] == [1.0, 1.0]


def test_one_more_machine_brings_what_it_adds() -> None:
    asked = scenario((change_card(count=2), MachineKind("slow", 1, 8, "line", block_ms=20, row_ms=1)))
    answer = answer_scenario(asked, {}, with_one_more=True)
    card, slow = answer.one_more
    assert card.mean_tokens_per_s > slow.mean_tokens_per_s > answer.models[0].mean_tokens_per_s


def test_training_is_predicted_by_what_the_product_would_choose_by() -> None:
    def asked(up_mbit: float) -> Scenario:
        run = TrainingScenario("tune", parameters=1e8, tokens_per_sample=256, batch=8_192, machines=("card",))
        wanted = scenario((change_card(count=4, tflops=20),))
        link = LinkKind(LINE.name, up_mbit=up_mbit, down_mbit=up_mbit)
        return msgspec.structs.replace(wanted, training=(run,), links=(link,))

    codecs = codec_traffic("float32")
    (fast,) = answer_scenario(asked(10_000), {}, codecs).training
    (slow,) = answer_scenario(asked(5), {}, codecs).training
    assert fast.n_members == slow.n_members == 4
    assert fast.chosen is not None
    assert slow.chosen is not None
    assert fast.chosen.action.setting.synchronisation == "step"
    assert slow.chosen.action.setting.synchronisation == "diloco"


def test_a_layout_is_compared_with_the_best_one_found() -> None:
    alone = answer_scenario(scenario((change_card(count=1),)), {}).models[0]
    assert alone.layout_share is None, "one machine has no layout"
    several = answer_scenario(scenario((change_card(count=5, memory_gb=1.7),)), {}).models[0]
    assert several.layout_share is not None
    assert 0.5 < several.layout_share <= 1.0


def test_machines_of_a_run_in_stages_are_dealt_by_their_links() -> None:
    run = TrainingScenario("large", parameters=1e9, tokens_per_sample=256, batch=64, stages=2)
    kinds = (
        change_card(name="east", count=4, tflops=20, places={"here": 1.0}),
        change_card(name="west", count=4, tflops=20, places={"there": 1.0}),
    )
    wanted = msgspec.structs.replace(scenario(kinds), training=(run,))
    (dealt,) = answer_scenario(wanted, {}, codec_traffic("float32")).training
    assert dealt.stages.startswith("2 stages of 4 machines: links take ")
    too_few = msgspec.structs.replace(wanted, machines=kinds[:1], training=(msgspec.structs.replace(run, stages=8),))
    (none,) = answer_scenario(too_few, {}, codec_traffic("float32")).training
    assert none.stages == "4 machines are too few for 8 stages"


def test_a_conversation_that_no_server_has_room_for_is_refused_and_counted() -> None:
    long = msgspec.structs.replace(TALK_HERE, prompt_tokens=500_000)
    answer = answer_scenario(scenario((HERE,), (long,)), {})
    assert answer.load is not None
    assert answer.load.n_refused == answer.load.n_begun > 0
    assert any("found no room" in limit for limit in answer.models[0].limits)


def test_a_chain_that_passes_a_server_twice_leaves_nothing_behind() -> None:
    """Fast cards with some blocks, and a slow box that holds all: chains enter it before and behind a card."""
    card = change_card(name="card", count=2, memory_gb=1.3, block_ms=0.5, places={"here": 1.0})
    box = change_card(name="box", count=1, block_ms=40, places={"here": 1.0})
    asked = scenario((box, card), (msgspec.structs.replace(TALK_HERE, sessions_per_hour=200),), hours=1)
    seen: dict[str, int] = {}
    twice = 0
    clock = VirtualClock()
    geography = Geography(asked)
    pool = ServerPool(asked, geography, clock, random.Random(1))
    rng = random.Random(2)
    for kind in asked.machines:
        for _ in range(kind.count):
            pool.add(kind, draw_line(LINE, "here", rng), [Stay(0.0, 9_000.0, False)])
    sessions = ModelledSessions(asked, pool, geography, clock, random.Random(3), 0.0)
    clock.run(600)
    middle = Span(3, 5)
    for server in pool.servers.values():  # the cards hold the middle, so that chains come back to the box
        if server.kind.name == "card" and server.record is not None:
            server.span = middle
            server.record = msgspec.structs.replace(server.record, start=middle.start, end=middle.end)
            pool._announce(server, server.record)
    for number in range(20):
        clock.run(600 + 2 * number)
        sessions.begin(asked.load[0], draw_line(LINE, "here", rng))
        for peer, open_here in sessions._through.items():
            twice += len(open_here) > len(sessions._sessions_at(peer))
    clock.run(3_000)
    assert twice > 0, "else this shows nothing"
    for server in pool.servers.values():
        seen[server.peer] = server.n_decoding
        assert server.cache.free_tokens == server.cache.total_tokens
    assert set(seen.values()) == {0}


def test_a_model_without_holders_is_rescued_by_a_machine_that_it_fits() -> None:
    large = ServedModel("large", blocks=4, block_parameters=3e9, hidden=1024, cache_numbers=1024)
    kinds = (
        change_card(name="small", count=4),
        change_card(name="server", count=2, memory_gb=60, serves="large", habit="leaves"),
        change_card(name="wide", count=3, memory_gb=60, habit="comes"),
    )
    habits = (Habit("leaves", hours="20:00-1:00"), Habit("comes", hours="23:40-24:00, 0:00-12:00"))
    run = run_once(scenario(kinds, (), habits, models=(MODEL, large), hours=4), {}, 1)
    assert run.models["large"].rarest[-1] > 0
    assert run.models["toy"].rarest[-1] > 0


def test_days_of_the_week_are_those_of_the_scenario() -> None:
    habit = Habit("weekend", hours="sat, sun")
    run = run_once(scenario((change_card(habit=habit.name),), (), (habit,), hours=168), {}, 1)
    by_day = run.models["toy"].n_online.reshape(7, -1).mean(axis=1)
    assert [round(online) for online in by_day] == [0, 0, 0, 0, 0, 1, 1]


def test_training_by_machines_that_were_measured_is_as_fast_as_they_are() -> None:
    run = TrainingScenario("tune", parameters=1e8, tokens_per_sample=256, batch=256)
    wanted = msgspec.structs.replace(scenario((change_card(count=2, prefill_ms=0.02),)), training=(run,))
    (answer,) = answer_scenario(wanted, {}, codec_traffic("float32")).training
    assert 1 < answer.predictions[0].samples_per_s < 1_000
