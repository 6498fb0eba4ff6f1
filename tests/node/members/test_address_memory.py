"""Addresses to begin with after a restart."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from swarmd.node.members.address_memory import MAX_REMEMBERED, AddressMemory
from swarmd.values import PeerId

ME = PeerId("me")


def test_what_was_met_comes_before_what_is_older_and_is_there_after_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    memory = AddressMemory({ME: ("here",), PeerId("old"): ("a",)}, file, ME)
    assert list(memory.known) == ["old"], "nobody dials himself"
    memory.remember({PeerId("new"): ("b",)})
    assert list(memory.known) == ["new", "old"]
    assert AddressMemory({PeerId("old"): ("of the invite",)}, file, ME).known == {"old": ("a",), "new": ("b",)}


def test_what_is_given_is_tried_first_and_what_was_known_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    memory = AddressMemory({PeerId("old"): ("a",), PeerId("moved"): ("b", "c")}, file, ME)
    memory.add({PeerId("moved"): ("d", "b"), ME: ("here",)})
    assert list(memory.known.items()) == [("moved", ("d", "b", "c")), ("old", ("a",))]
    assert AddressMemory({PeerId("moved"): ("of the invite",)}, file, ME).known["moved"] == ("d", "b", "c"), "kept"
    memory.remember({PeerId("moved"): ("e",)})
    assert memory.known["moved"] == ("e",), "what it announces itself is what counts"


def test_it_remembers_so_many_the_newest(tmp_path: Path) -> None:
    memory = AddressMemory({PeerId("old"): ("a",)}, None, ME)
    memory.remember({PeerId(f"p{i}"): ("b",) for i in range(MAX_REMEMBERED)})
    assert len(memory.known) == MAX_REMEMBERED
    assert "old" not in memory.known


def test_a_file_that_cannot_be_read_or_written_costs_nothing_but_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "peers.json"
    file.write_text("[5")
    memory = AddressMemory({PeerId("old"): ("a",)}, file, ME)
    assert list(memory.known) == ["old"]
    assert "it is made anew" in caplog.text
    memory = AddressMemory({}, tmp_path / "nowhere" / "peers.json", ME)
    memory.remember({PeerId("new"): ("b",)})
    assert "addresses are not remembered: cannot write" in caplog.text


def test_a_full_disk_loses_nothing_that_was_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "peers.json"
    AddressMemory({}, file, ME).remember({PeerId("old"): ("a",)})
    memory = AddressMemory({}, file, ME)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, limits[1]))  # of each file: as if there were no more room
    try:
        memory.remember({PeerId("new"): ("b",)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "addresses are not remembered: cannot write" in caplog.text
    assert AddressMemory({}, file, ME).known == {"old": ("a",)}
    assert [*tmp_path.iterdir()] == [file]
