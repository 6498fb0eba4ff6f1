"""What a recipe, data, or a peer may not do: each refused with a reason, and nothing else is harmed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from swarmd.errors import ConfigError, IntegrityError, RemoteProtocolError
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.models import manifest
from swarmd.protocol.runs.recipe import (
    Optimizer,
    Recipe,
    RunOrder,
    read_order_untrusted,
    read_run_untrusted,
    read_toml,
    sign_order,
    start_run,
)
from swarmd.protocol.wire import rounds
from swarmd.protocol.wire.rounds import Group, GroupMember, GroupPart, JoinRound, Prepare, Pulse
from swarmd.train.rounds.groups import check_group, shrink_group
from swarmd.train.store.data import pack_texts, read_shard, rows_of_shards
from swarmd.values import PeerId
from swarmd.weights.folder import ModelFolder
from tests.train.world import TrainingWorld, check_ledger

OWNER = Identity(b"o" * 32)
RECIPE = Recipe("r", "0" * 64, "1" * 64, anchors=(OWNER.peer_id,))
HEAD = 'name = "x"\nmodel = "m"\ndata = "d"\n'
MEMBERS = (GroupMember("a", 0, 4, True), GroupMember("b", 0, 4, True))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('name = "x"\nmodel = "m"\n', "data"),
        (HEAD + "lerning_rate = 1\n", "lerning_rate"),
        (HEAD + "[optimizer]\nlearning_rate = -1.0\n", "optimizer.learning_rate"),
        (HEAD + "[batch]\ntarget = 0\n", "batch.target"),
        (HEAD + '[optimizer]\nkind = "lion"\n', "lion"),
        (HEAD + "stages = 0\n", "stages"),
        (HEAD + "stages = 99\n", "stages"),
        (HEAD + 'stages = "many"\n', "expected how many, the first block of each, or \"auto\", got 'many'"),
        (HEAD + 'stages = 2\nsynchronisation = "diloco"\n', "stages cannot be"),
        (HEAD + 'stages = 2\nprecision = "float64"\n', "does not travel between stages"),
        (HEAD + 'stages = 2\nrobust = "clip"\n', "robust"),
        (HEAD + 'stages = 2\ntrain = "lora"\nlora = {targets = ["q_proj"]}\n', "every member holds all of it"),
        (HEAD + 'activations = "int8"\n', "stages says how many"),
        (HEAD + 'synchronisation = "often"\n', "synchronisation"),
        (HEAD + "[diloco]\nfragments = 2\n", 'needs synchronisation = "diloco"'),
        (HEAD + "[parts]\nkeep = 64\n", 'parts.keep needs codec = "topk", got "none"'),
        (HEAD + '[parts]\ncodec = "int9"\n', "parts.codec"),
        (HEAD + '[parts]\ncodec = "topk"\nkeep = 60\n', "parts.keep"),
        (HEAD + 'synchronisation = "diloco"\n[diloco]\nbatch = 0\n', "diloco.batch"),
        (HEAD + "[lora]\nrank = 4\n", '[lora] needs train = "lora", got "all"'),
        (HEAD + 'train = "lora"\n', "needs the names of modules: lora.targets"),
        (
            HEAD + "[optimizer]\nmomentum = 0.9\n",
            'optimizer.momentum needs kind = "sgd" or "muon", got "adamw"',
        ),
        (
            HEAD + '[optimizer]\nkind = "sgd"\nbeta1 = 0.8\n',
            'optimizer.beta1 needs kind = "adamw" or "muon", got "sgd"',
        ),
        (
            HEAD + '[optimizer]\nkind = "sgd"\nnesterov = true\n',
            'optimizer.nesterov needs kind = "adamw" or "muon", got "sgd"',
        ),
        (
            HEAD + 'synchronisation = "diloco"\n[optimizer]\nnesterov = true\n',
            "optimizer.nesterov is for steps of the swarm as a whole",
        ),
        (
            HEAD + 'robust = "clip"\n[optimizer]\nkind = "muon"\n',
            'robust = "clip" cannot be: muon\'s momentum is of matrices',
        ),
        (
            HEAD + "[optimizer]\nlearning_rate = 0.1\nweight_decay = 30.0\n",
            "learning_rate times weight_decay is 3:",
        ),
        (HEAD + "[schedule]\nfloor = 0.1\n", "schedule.floor needs decay"),
        (
            HEAD + '[schedule]\ndecay = "cosine"\nwarmup = 50\n[stop]\nsteps = 10\n',
            "schedule.warmup is 50, expected less than the 10 updates",
        ),
        (
            HEAD + 'precision = "bfloat16"\n',
            "precision: expected one of float32, float64, got 'bfloat16'",
        ),
        ('name = "x\\ny"\nmodel = "m"\ndata = "d"\n', "one line of characters that can be seen"),
        ("name = ", "no TOML"),
    ],
)
def test_wrong_recipes_are_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        read_toml(path)
    assert said in str(refusal.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_toml(tmp_path / "none.toml")


@given(st.binary(max_size=200))
def test_runs_and_orders_from_anywhere_raise_one_error_only(raw: bytes) -> None:
    with pytest.raises(IntegrityError):
        read_run_untrusted(raw)
    with pytest.raises(IntegrityError):
        read_order_untrusted(raw, start_run(RECIPE, OWNER, 1))


def test_only_its_owner_orders_a_run() -> None:
    run, stranger = start_run(RECIPE, OWNER, 1), Identity(b"s" * 32)
    order = RunOrder(run.id, 1, "stopped")
    assert read_order_untrusted(sign_order(order, OWNER), run).state == "stopped"
    with pytest.raises(IntegrityError, match="owner"):
        read_order_untrusted(sign_order(order, stranger), run)
    with pytest.raises(IntegrityError, match="another run"):
        read_order_untrusted(sign_order(RunOrder("f" * 64, 1), OWNER), run)
    later = RunOrder(run.id, 2, generation=2, anchors=(stranger.peer_id,), earlier=((OWNER.peer_id,),))
    assert set(later.sets_of(RECIPE)) == {0, 1, 2}
    with pytest.raises(IntegrityError, match="each generation"):
        read_order_untrusted(sign_order(RunOrder(run.id, 2, generation=2, anchors=(stranger.peer_id,)), OWNER), run)
    with pytest.raises(IntegrityError, match="by hash"):
        start_run(Recipe("r", "demo", "1" * 64, anchors=(OWNER.peer_id,)), OWNER, 1)


def group(**changes: object) -> Group:
    fields: dict[str, object] = {
        "n_elements": 100,
        "members": MEMBERS,
        "parts": (GroupPart(0, 0, 64), GroupPart(1, 64, 100)),
    }
    return Group(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        group(parts=(GroupPart(0, 0, 64), GroupPart(9, 64, 100))),
        group(parts=(GroupPart(0, 0, 64), GroupPart(1, 48, 100))),
        group(parts=(GroupPart(0, 0, 48), GroupPart(1, 64, 100))),
        group(parts=(GroupPart(0, 0, 64),)),
        group(parts=(GroupPart(0, 0, 60), GroupPart(1, 60, 100))),
        group(parts=()),
        group(n_elements=2**40, parts=(GroupPart(0, 0, 2**40),)),
        group(dtype="int32"),
        group(n_elements=99, parts=(GroupPart(0, 0, 99),)),
        group(members=(MEMBERS[0], MEMBERS[0])),
        group(members=(GroupMember("a", 0, 4, True, False), GroupMember("b", 0, 0, True))),
    ],
)
def test_groups_that_do_not_fit_are_refused(wrong: Group) -> None:
    check_group(group(), None, 100, RECIPE)
    with pytest.raises(RemoteProtocolError):
        check_group(wrong, None, 100, RECIPE)
    with pytest.raises(RemoteProtocolError):
        check_group(group(members=MEMBERS[::-1]), group(), 100, RECIPE)


def test_a_group_that_loses_many_stays_one_that_others_take() -> None:
    members = tuple(GroupMember(f"m{i}", 0, 4, True) for i in range(64))
    now = group(
        n_elements=65_536, members=members, parts=tuple(GroupPart(i, 1_024 * i, 1_024 * i + 1_024) for i in range(64))
    )
    for i in range(40):
        lost = PeerId(f"m{i}")
        changed = shrink_group(now, {lost}, {f"m{k}" for k in range(i + 1)}, PeerId("m63"), 16)
        assert changed is not None
        check_group(changed, now, 65_536, RECIPE)
        assert len(changed.parts) <= rounds.MAX_PARTS
        now = changed
    assert {p.reducer for p in now.parts} == set(range(40, 64))


def test_data_is_packed_checked_and_damage_found(tmp_path: Path) -> None:
    texts = [list(range(1, 40)), list(range(40, 99))]
    assert pack_texts(texts, 8, 100, tmp_path, seed=1) == 12
    read = manifest.read_folder(tmp_path)
    assert rows_of_shards(read, 8) == (12,)
    rows = read_shard(ModelFolder(tmp_path, read), 0)
    assert rows.shape == (12, 9)
    assert (np.diff(rows, axis=1) == 1).all()
    with pytest.raises(IntegrityError, match="rows of 17"):
        rows_of_shards(read, 16)
    with pytest.raises(ConfigError, match="those from 0 to 49"):
        pack_texts(texts, 8, 50, tmp_path / "b", seed=1)
    with pytest.raises(ConfigError, match="a row takes"):
        pack_texts([[1, 2]], 8, 50, tmp_path / "b", seed=1)
    path = tmp_path / "model.safetensors"
    folder = ModelFolder(tmp_path, read)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(IntegrityError, match="damaged"):
        read_shard(folder, 0)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == manifest.DATA


async def test_hostile_messages_harm_nobody(virtual_time: MockClock) -> None:
    """A member of the swarm sends every message of a run with values that no honest one sends."""
    async with trio.open_nursery() as nursery:
        world = TrainingWorld(nursery, seed=7, n_anchors=1)
        world.add_anchors()
        members = [world.add() for _ in range(3)]
        hostile = world.add("reduce")
        await world.until(epoch=2, within_s=100)
        run, head = world.run.id, members[0].trainer.ledger.head
        evil = [
            JoinRound(id=1, run=run, parent=head, n=2**50, n_elements=2**40, dtype="int7", up_bytes_per_s=1e-305),
            JoinRound(id=2, run=run, parent=head, first=2**50, n=4, loss=-1e30, n_elements=240),
            Prepare(id=3, run=run, parent=head, ballot=(2**53, "~")),
            rounds.Propose(id=4, run=run, ballot=(1, "x")),
            group(run=run, parent=head, parts=(GroupPart(200, 0, 100),)),
            Pulse(run=run, parent=head, retry_ms=2**50),
            rounds.Beat(run=run, received=(rounds.Received(200, 2**50, 1e30),)),
            rounds.Contribution(run=run, start=2**40),
            rounds.Reduced(run=run, version=60_000, start=2**40),
            rounds.Commits(run=run),
            rounds.WantCommits(id=5, run=run, after=2**53),
            rounds.WantState(id=6, run=run),
            rounds.WantRun(id=7, run=run),
        ]
        for member in [*members, *world.members.values()]:
            for purpose in ("bulk", "averaging"):
                for message in evil:
                    if member is not hostile:
                        with trio.move_on_after(1):
                            channel = await hostile.rpc.channel(member.peer, purpose)
                            await channel.send(message, b"\xff" * 13)
        epoch = members[0].trainer.ledger.epoch
        await world.until(epoch=epoch + 3, within_s=200)
        check_ledger(world)
        nursery.cancel_scope.cancel()


def test_muons_momentum_is_jordans_where_nothing_is_said(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    for words, momentum in (("", 0.95), ("momentum = 0.8\n", 0.8)):
        path.write_text(HEAD + f'[optimizer]\nkind = "muon"\n{words}')
        assert read_toml(path).optimizer.momentum == momentum


def test_who_says_delayed_learns_what_it_costs() -> None:
    assert "nesterov = true" in Optimizer().price_of_delay
    assert 'kind = "muon"' in Optimizer(kind="sgd").price_of_delay
    assert not Optimizer(nesterov=True).price_of_delay
    assert not Optimizer(kind="muon").price_of_delay
