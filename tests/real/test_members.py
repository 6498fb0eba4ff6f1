"""Invites, approval, rights and founders on real daemons, by the command line, as people use them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import swarmd
from swarmd.errors import SwarmError
from swarmd.home.membership import MembershipFiles
from swarmd.home.paths import Home
from tests.real.forks import Command
from tests.real.harness import LocalSwarm, Volunteer, local_swarm

pytestmark = pytest.mark.slow
QUIET = ("--listen", "/ip4/127.0.0.1/tcp/0", "--no-serve")
A_YEAR_S = 365 * 86_400


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[LocalSwarm]:
    with local_swarm(tmp_path) as started:
        started.add("--serve", "demo")
        yield started


def says(home: Home, *words: str, code: int = 0) -> str:
    """What one command prints, on both its outputs."""
    done: subprocess.CompletedProcess[str] = Command("--home", str(home.folder), *words).finish()
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def invited(swarm: LocalSwarm, *words: str, by: int = 0) -> str:
    return says(swarm.volunteers[by].home, "invite", *words).splitlines()[0]


def joined(swarm: LocalSwarm, invite: str, *arguments: str) -> Volunteer:
    """A machine that joins by an invite, and its daemon."""
    home = Home(swarm.folder / f"peer{len(swarm.volunteers)}")
    says(home, "join", invite)
    volunteer = Volunteer(home, arguments or QUIET, {})
    swarm.volunteers.append(volunteer)
    volunteer.start()
    swarm.wait(lambda: volunteer.is_listening, "its control socket", volunteer)
    return volunteer


def members(volunteer: Volunteer) -> dict[str, dict[str, object]]:
    return {row["peer"]: row for row in json.loads(says(volunteer.home, "members", "ls", "--json"))["members"]}


def test_an_invite_is_for_one_machine_which_stays_when_it_has_ended(swarm: LocalSwarm) -> None:
    founder, invite = swarm.volunteers[0], invited(swarm)
    guest = joined(swarm, invite)
    swarm.wait(lambda: guest.peer in members(founder), "the founder to know it")
    swarm.wait(lambda: int(str(members(founder)[guest.peer]["ends_at"])) > time.time() + A_YEAR_S / 2, "its admission")
    swarm.wait(lambda: MembershipFiles(guest.home).catalog().admitted, "the catalog at the guest's")
    said = says(Home(swarm.folder / "second"), "join", invite, code=2)
    assert "for once, and others came first" in said
    with pytest.raises(SwarmError, match="others came first"), swarmd.connect(invite) as client:
        client.model("demo", wait_s=5)
    with swarmd.connect(invited(swarm, "--uses", "0")) as client:
        assert client.model("demo", wait_s=60)


def test_who_waits_is_shown_and_let_in_once_a_founder_says_so(swarm: LocalSwarm) -> None:
    founder, home = swarm.volunteers[0], Home(swarm.folder / "waiting")
    said = says(home, "join", invited(swarm, "--approve", "--may", "use"))
    assert "A founder lets this machine in with: swarmd members approve" in said
    guest = Volunteer(home, QUIET, {})
    swarm.volunteers.append(guest)
    guest.start()
    swarm.wait(lambda: guest.is_listening, "its control socket", guest)
    swarm.wait(lambda: [row["peer"] for row in founder.ask("peers")["waiting"]] == [guest.peer], "it to knock")
    assert guest.peer[-8:] in says(founder.home, "members", "ls")
    assert guest.peer not in members(founder)
    assert "waits for a founder: swarmd members approve" in guest.ask("status")["directory"]["reason"]
    says(founder.home, "members", "approve", "nobody", code=2)
    said = says(founder.home, "members", "approve", guest.peer[-8:])
    assert said.strip().endswith("is a member for 365 days, and may use.")
    swarm.wait(lambda: guest.peer in members(founder), "it to be let in")
    assert members(founder)[guest.peer]["may"] == ["use"]
    assert founder.ask("peers")["waiting"] == []


def test_an_invite_is_for_what_it_says(swarm: LocalSwarm) -> None:
    founder = swarm.volunteers[0]
    says(founder.home, "invite", "--may", "use,steal", code=2)
    only_uses = joined(swarm, invited(swarm, "--may", "use"), "--listen", "/ip4/127.0.0.1/tcp/0", "--serve", "demo")
    swarm.wait(lambda: only_uses.peer in members(founder), "it to be known")
    assert only_uses.ask("status")["hosting"][0]["why"] == "this machine's invite is for: use"
    assert not [row for row in founder.ask("peers")["peers"] if row["peer"] == only_uses.peer and row["spans"]]
    assert says(only_uses.home, "run", "demo", "def", "--max-tokens", "4", "--raw")
    only_serves = joined(swarm, invited(swarm, "--may", "serve"))
    swarm.wait(lambda: only_serves.peer in members(founder), "it to be known")
    with pytest.raises(SwarmError, match="not to use"), swarmd.connect(home=only_serves.home.folder) as client:
        client.model("demo", wait_s=60).generate(torch.arange(8).unsqueeze(0), max_new_tokens=2)


def test_the_order_of_what_is_short_is_the_founders_to_say_and_reaches_all(swarm: LocalSwarm) -> None:
    founder, guest = swarm.volunteers[0], joined(swarm, invited(swarm))
    swarm.wait(lambda: guest.peer in members(founder), "it to be known")
    assert "equal" in says(guest.home, "members", "order")
    says(guest.home, "members", "order", "key", code=2)
    says(founder.home, "members", "order", "by age", code=2)
    assert "once the order is by key" in says(founder.home, "members", "favour", guest.peer[-8:], "4")
    says(founder.home, "members", "order", "key")
    swarm.wait(lambda: MembershipFiles(guest.home).catalog().order == "key", "the order")
    assert list(MembershipFiles(guest.home).catalog().favours.values()) == [4]
    assert says(guest.home, "run", "demo", "def", "--max-tokens", "4", "--raw")
    swarm.wait(lambda: says(guest.home, "credit", "--json"), "the books")


def test_a_founder_that_is_lost_is_followed_by_the_two_others(swarm: LocalSwarm) -> None:
    first = swarm.volunteers[0]
    second, third, guest = (joined(swarm, invited(swarm)) for _ in range(3))
    swarm.wait(lambda: len(MembershipFiles(guest.home).catalog().admitted) == 3, "all to be admitted")
    key = {v.peer: says(v.home, "founders", "key").strip() for v in (second, third)}
    assert "leaves nobody" in says(first.home, "founders", "add", key[second.peer], "--needed", "2", code=2)
    says(first.home, "founders", "add", "abc", code=2)
    says(first.home, "founders", "add", key[second.peer])
    assert "It counts from now on" in says(first.home, "founders", "add", key[third.peer], "--needed", "2")
    others = [MembershipFiles(v.home) for v in (second, third, guest)]
    swarm.wait(lambda: all(len(other.catalog().charters) == 2 for other in others), "the charters")
    lost = json.loads(says(second.home, "founders", "ls", "--json"))["founders"][0]
    first.stop()
    shutil.rmtree(first.home.folder)
    said = says(second.home, "founders", "rm", lost)
    (line,) = re.findall(r"charter1-\S+", said)
    assert len(json.loads(says(guest.home, "founders", "ls", "--json"))["founders"]) == 3, "one alone changes nothing"
    assert "It counts from now on" in says(third.home, "founders", "sign", line)
    swarm.wait(lambda: len(MembershipFiles(guest.home).catalog().charters) == 3, "the last charter")
    newcomer = joined(swarm, invited(swarm, by=1))
    swarm.wait(lambda: {newcomer.peer, third.peer} <= set(members(guest)), "a newcomer by the second founder's invite")
