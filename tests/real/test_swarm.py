"""Finding each other, being cut off, and servers that cannot reach each other: as real processes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import trio

import swarmd
from swarmd.home.founder import Founder
from swarmd.home.membership import MembershipFiles
from swarmd.home.paths import Home
from swarmd.plan.chains.routing import Hop
from tests.real.faults import generate, inputs_for
from tests.real.harness import LocalSwarm, Volunteer, local_swarm

pytestmark = pytest.mark.slow


@dataclass
class Pair:
    """Two volunteers with half of the bundled model each, for tests that only look."""

    swarm: LocalSwarm
    first: Volunteer
    second: Volunteer

    @property
    def hops(self) -> tuple[Hop, ...]:
        return self.swarm.hops((self.first, 0, 3), (self.second, 3, 6))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    torch.set_num_threads(1)
    with local_swarm(tmp_path_factory.mktemp("pair")) as swarm:
        yield Pair(swarm, *swarm.serving((0, 3), (3, 6)))


def members_seen_by(volunteer: Volunteer) -> set[str]:
    return {row["peer"] for row in volunteer.ask("peers")["peers"]}


def start_blocking(swarm: LocalSwarm, blocked: Volunteer, *arguments: str) -> Volunteer:
    return swarm.add(*arguments, SWARMD_BLOCKED_PEERS=blocked.peer)


def test_servers_that_cannot_reach_each_other_are_joined_by_the_client(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    with local_swarm(tmp_path) as swarm:
        meeting_point = swarm.add("--no-serve")
        first = swarm.add("--serve", "demo", "--blocks", "0:3")
        second = start_blocking(swarm, first, "--serve", "demo", "--blocks", "3:6")
        swarm.wait_online()
        with swarmd.connect(home=meeting_point.home.folder) as client:
            model = client.model("demo")
            inputs = inputs_for("greedy", 1024, 1)
            generate(model, "greedy", inputs, 12, 1)
            statistics = model.last_session.statistics
            assert statistics.forwarded == statistics.steps == 12
            assert not statistics.repairs
            cache = model.new_cache()
            model(inputs["input_ids"], past_key_values=cache)
            why = [s["why"] for s in first.ask("why")["sessions"]]
            assert any("returns to the client" in w and "cannot be reached" in w for w in why), why
            cache.close()
        assert second.ask("status")["server"]["tokens_served"] > 0


def test_newcomer_finds_through_the_dht_what_its_invite_does_not_name(tmp_path: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        founder = swarm.add("--no-serve", SWARMD_EXCHANGE="0")
        server = swarm.add("--serve", "demo", "--blocks", "0:3", SWARMD_EXCHANGE="0")
        swarm.wait(lambda: "online" in (server.ask("status")["worker"] or {}).get("state", ""), "a worker")
        home = Home(tmp_path / "newcomer")
        from swarmd.protocol.membership.identity import Identity

        ticket = Founder(founder.home).invite(tuple(founder.ask("status")["addresses"]), 3_600)
        MembershipFiles(home).enter(ticket, Identity.generate(), MembershipFiles(founder.home).catalog_raw())
        assert server.peer not in MembershipFiles(home).bootstrap()
        newcomer = Volunteer(home, ("--listen", "/ip4/127.0.0.1/tcp/0", "--no-serve"), {"SWARMD_EXCHANGE": "0"})
        swarm.volunteers.append(newcomer)
        newcomer.start()
        swarm.wait(home.socket.exists, "its control socket", newcomer)
        swarm.wait(lambda: server.peer in members_seen_by(newcomer), "the server in the newcomer's view")
        spans = [s for row in newcomer.ask("peers")["peers"] for s in row["spans"]]
        assert [s["blocks"] for s in spans] == [[0, 3]]


def test_the_bootstrap_peer_may_die(tmp_path: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        founder, second, third = (swarm.add("--no-serve") for _ in range(3))
        everybody = {founder.peer, second.peer, third.peer}
        swarm.wait(lambda: all(members_seen_by(v) == everybody for v in (second, third)), "complete views")
        invite = Founder(founder.home).invite(swarm.addresses(), 3_600)
        founder.signal(signal.SIGKILL)
        founder.stop()
        from swarmd.protocol.membership.identity import Identity

        home = Home(tmp_path / "late")
        MembershipFiles(home).enter(invite, Identity.generate(), None)
        late = Volunteer(home, ("--listen", "/ip4/127.0.0.1/tcp/0", "--no-serve"))
        swarm.volunteers.append(late)
        late.start()
        swarm.wait(home.socket.exists, "its control socket", late)
        newer = {second.peer, third.peer, late.peer}
        swarm.wait(lambda: all(newer <= members_seen_by(v) for v in (second, third, late)), "the newcomer in all views")
        swarm.wait(lambda: late.ask("models")["models"], "the catalog, from a member that is not the founder")


def test_daemon_that_was_cut_off_comes_back_and_serves(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    with local_swarm(tmp_path) as swarm:
        a, b = swarm.serving((0, 3), (3, 6))
        b.signal(signal.SIGSTOP)
        time.sleep(10)  # long enough for every connection to be given up (yamux: four pings of 2 s)
        b.signal(signal.SIGCONT)
        swarm.wait_online()
        with swarmd.connect(home=a.home.folder) as client:
            model = client.model("demo")
            generate(model, "greedy", inputs_for("greedy", 1024, 1), 8, 1)
            assert not model.last_session.statistics.repairs


@pytest.mark.prove  # two minutes: so long a member is believed in of which nothing is heard
def test_a_machine_that_slept_knows_the_others_when_it_wakes(tmp_path: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        sleeper, *others = (swarm.add("--no-serve") for _ in range(3))
        everybody = {v.peer for v in swarm.volunteers}
        swarm.wait(lambda: all(members_seen_by(v) == everybody for v in swarm.volunteers), "complete views")
        sleeper.signal(signal.SIGSTOP)
        swarm.wait(lambda: all(sleeper.peer not in members_seen_by(v) for v in others), "it to be missed", within_s=120)
        sleeper.signal(signal.SIGCONT)
        while not all(sleeper.peer in members_seen_by(v) for v in others):
            assert members_seen_by(sleeper) == everybody, "whom it could not hear is not gone"
            time.sleep(0.2)


def test_client_for_trio_programs_and_client_beside_a_daemon(pair: Pair) -> None:
    members = {pair.first.peer, pair.second.peer}

    async def look() -> None:
        async with swarmd.aconnect(home=pair.first.home.folder) as inside:
            assert members <= set(inside.view().peers)
            assert inside.rpc.network.peer_id not in members
            assert (await inside.resolve("demo"))[1] == 6

    trio.run(look)
    with swarmd.connect(pair.swarm.invite()) as client:
        assert set(client.view().peers) == members, "clients do not announce themselves"
        with pytest.raises(swarmd.ConfigError, match="the swarm's catalog has no model 'nope'; it has: demo"):
            client.model("nope")
        model = client.model("demo")
        with pytest.raises(swarmd.CacheExhausted, match="limit is 2048"):
            model.generate(torch.zeros(1, 2000, dtype=torch.long) + 5, max_new_tokens=100)


def test_several_threads_share_a_client(pair: Pair) -> None:
    with swarmd.connect(home=pair.first.home.folder) as client:
        model = client.model("demo")
        prompts = [inputs_for("greedy", 1024, seed) for seed in range(3)]
        alone = [generate(model, "greedy", p, 16, 0).sequences for p in prompts]
        together: dict[int, torch.Tensor] = {}

        def work(index: int) -> None:
            together[index] = generate(model, "greedy", prompts[index], 16, 0).sequences

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(together[i], alone[i]) for i in range(3))
    for volunteer in (pair.first, pair.second):
        pair.swarm.wait(lambda v=volunteer: not v.ask("sessions")["sessions"], "the sessions to be closed")  # type: ignore[misc]


def test_missing_blocks_are_named(tmp_path: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        (only,) = swarm.serving((1, 4))
        with swarmd.connect(home=only.home.folder) as client, pytest.raises(swarmd.NoRoute) as caught:
            client.model("demo", wait_s=0.5)
        assert [(s.start, s.end) for s in caught.value.missing] == [(0, 1), (4, 6)]


def test_a_range_of_one_dead_hop_is_recovered_on_two(tmp_path: Path) -> None:
    from tests import checkpoints
    from tests.real.faults import Blow, check_recovery, check_replayed, disturbed

    torch.set_num_threads(1)
    folder = checkpoints.make("llama", tmp_path / "llama", n_layers=8)
    with local_swarm(tmp_path) as swarm:
        spans = ((0, 2), (2, 6), (6, 8), (0, 4), (4, 8))
        volunteers = swarm.serving(*spans, model="eight", models={"eight": folder})
        a, b, c = volunteers[:3]
        with swarmd.connect(home=a.home.folder) as client:
            model = client.model("eight", chain=swarm.hops((a, 0, 2), (b, 2, 6), (c, 6, 8)))
            inputs = inputs_for("greedy", 320, 2)
            expected = generate(model, "greedy", inputs, 30, 2)
            blows = (Blow(12, (1,)),)
            outcome = disturbed(model, volunteers, "greedy", inputs, 30, 2, blows)
        check_recovery(outcome, volunteers, blows)
        check_replayed(outcome.out, expected, "float32")
        assert [hop.split(" ")[0] for hop in outcome.chain] == ["[0,2)", "[2,4)", "[4,6)", "[6,8)"]


def test_a_draft_model_speculates_and_the_chain_verifies(pair: Pair) -> None:
    from transformers import AutoModelForCausalLM

    from swarmd.home.models import bundled_folder

    draft = AutoModelForCausalLM.from_pretrained(bundled_folder(), dtype=torch.float32)
    with swarmd.connect(home=pair.first.home.folder) as client:
        model = client.model("demo", chain=pair.hops)
        inputs = inputs_for("greedy", 1024, 6)
        expected = generate(model, "greedy", inputs, 30, 6)
        plain_steps = model.last_session.statistics.steps
        out = generate(model, "greedy", inputs, 30, 6, assistant_model=draft)
        assert torch.equal(out.sequences, expected.sequences)
        assert model.last_session.statistics.steps < plain_steps / 2, "several tokens in one pass"
        torch.manual_seed(1)
        sampled = model.generate(**inputs, do_sample=True, max_new_tokens=20, assistant_model=draft)
        assert sampled.shape[1] > inputs["input_ids"].shape[1]


def test_codecs_travel_through_real_servers(pair: Pair) -> None:
    ids = inputs_for("greedy", 1024, 7)["input_ids"]
    with swarmd.connect(home=pair.first.home.folder) as client, torch.no_grad():
        chain = pair.hops
        raw = client.model("demo", chain=chain)(ids).logits
        worst = {}
        for codec in ("float16", "bfloat16", "int8"):
            logits = client.model("demo", chain=chain, codec=codec)(ids).logits
            worst[codec] = float((logits - raw).abs().max() / raw.abs().max())
        with pytest.raises(swarmd.ConfigError, match="codec is one of"):
            client.model("demo", chain=chain, codec="zip")(ids)
        eight = client.model("demo", chain=chain, head="int8")
        worst["head"] = float((eight(ids).logits - raw).abs().max() / raw.abs().max())
        assert eight.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False).shape[1] == ids.shape[1] + 4
    assert 0 < worst["float16"] < 0.005
    assert 0 < worst["bfloat16"] < 0.05
    assert 0 < worst["int8"] < 0.1
    assert 0 < worst["head"] < 0.05
