"""Which layers are served as one block."""

from __future__ import annotations

import pytest

from swarmd.compute.llama_cpp.cut_rules import ARRAY, GgufSetting, WholeFile
from swarmd.compute.llama_cpp.parts import PART_BYTES, choose_parts

UINT32 = 4
MIB = 1 << 20


def whole(architecture: str, n_layers: int, **settings: object) -> WholeFile:
    numbers = {"block_count": n_layers, **settings}
    kinds = {name: GgufSetting((ARRAY, UINT32) if isinstance(v, list) else (UINT32,), v) for name, v in numbers.items()}
    return WholeFile(architecture, kinds, [])


def sizes(file: WholeFile, layer_bytes: int) -> list[int]:
    parts = choose_parts(file, [layer_bytes] * file.n_blocks)
    assert [part.start for part in parts[1:]] == [part.end for part in parts[:-1]]
    assert (parts[0].start, parts[-1].end) == (0, file.n_blocks)
    return [len(part) for part in parts]


def test_small_layers_are_taken_together_and_large_ones_alone() -> None:
    assert sizes(whole("llama", 30), 2 * MIB) == [8, 7, 7, 8]
    assert sizes(whole("llama", 30), 6 * MIB) == [3, 2, 3, 3, 3, 2, 3, 3, 3, 2, 3]
    assert sizes(whole("llama", 80), 400 * MIB) == [1] * 80
    assert sizes(whole("llama", 2), 1) == [1, 1]
    assert sizes(whole("llama", 1), PART_BYTES * 4) == [1]


def test_a_part_begins_where_kinds_come_anew() -> None:
    windows = {"attention.sliding_window": 512}
    assert sizes(whole("gemma3", 26, **windows), 200 * MIB) == [6, 6, 6, 6, 2]
    assert sizes(whole("gpt-oss", 24, **windows), 1) == [6, 6, 6, 6]
    assert sizes(whole("smollm3", 36), 50 * MIB) == [4] * 9


@pytest.mark.parametrize("n_bytes", [1, 100 * MIB])
def test_a_part_of_a_hybrid_has_both_kinds(n_bytes: int) -> None:
    has_attention = [0, 0, 2, 0, 0, 2, 0, 0, 2, 0, 2, 0, 2, 0, 2, 0]
    file = whole("lfm2", 16, **{"attention.head_count_kv": has_attention})
    for part in choose_parts(file, [n_bytes] * 16):
        assert len({bool(has_attention[layer]) for layer in part.blocks()}) == 2
