"""Cards as the driver's tool lists them, and as a process with some of them sees them."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmd.resources import Card, find_card, list_cards

LISTED = "".join(f"GPU-{card}, NVIDIA Card\\n" for card in ("aaaa, 12034", "abbb, 8000", "cccc, [N/A]", "dddd, 24000"))
A, B, C = Card("GPU-aaaa", 12034 << 20), Card("GPU-abbb", 8000 << 20), Card("GPU-cccc", None)
D = Card("GPU-dddd", 24000 << 20)


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{LISTED}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    return tool


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, [A, B, C, D]),
        ("", []),
        ("1,0", [B, A]),
        ("GPU-d, 0", [D, A]),
        ("0,7,1", [A]),
        ("-1", []),
        ("GPU-e,0", []),
    ],
)
def test_a_process_sees_what_its_environment_shows_it(visible: str | None, seen: list[Card], tool: Path) -> None:
    assert list_cards({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == seen


def test_a_worker_takes_the_card_that_its_device_names(tool: Path) -> None:
    cards = list_cards({})
    assert [find_card(device, cards) for device in ("", "cuda", "cuda:1", "cuda:3")] == [A, A, B, D]
    assert [find_card(device, cards) for device in ("cuda:2", "cuda:4")] == [None] * 2
    assert [find_card(device, cards) for device in ("cpu", "mps", "vulkan", "vulkan:1")] == [None] * 4
    assert find_card("", []) is None


def test_cards_of_several_kinds_are_known_by_number_where_their_order_is(tool: Path) -> None:
    """CUDA's own is the fastest first, which the tool does not tell."""
    tool.write_text("#!/bin/sh\nprintf 'GPU-aaaa, 2000, NVIDIA T400\\nGPU-dddd, 24000, NVIDIA GeForce RTX 4090\\n'\n")
    assert list_cards({}) == list_cards({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}) == []
    first, _ = list_cards({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert first == Card("GPU-aaaa", 2000 << 20)


def test_a_driver_that_fails_tells_of_no_cards(tool: Path) -> None:
    tool.write_text("#!/bin/sh\necho 'GPU-aaaa, 12034, NVIDIA Card'; exit 9\n")
    assert list_cards({}) == []
    tool.unlink()
    assert list_cards({}) == []
