"""What travels of a token comes back as it was, however it is coded, and what cannot be is refused."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmd.compute.model import skeleton
from swarmd.compute.model.client_part import load_client_part
from swarmd.compute.model.rows import RowFormat
from swarmd.errors import ConfigError
from swarmd.protocol.models.model_layout import ALIGNMENT, EACH_LAYER, ID_DIGITS, ModelLayout, Sideband
from swarmd.protocol.wire.tensors import INT4_BLOCK, INT8_BLOCK
from swarmd.wire.tensors import pack, unpack_untrusted
from tests import families

IDS, ROUTER = Sideband("input_ids", "ids"), Sideband("router_states", "next", 3, 1)
EMBEDDING, OF_EACH = Sideband("embedding", "all", 5), Sideband("per_layer", "each", 2)
VOCABULARY = 250_000
FORMAT = RowFormat(ModelLayout(sidebands=(IDS, ROUTER, EMBEDDING, OF_EACH)), 16, 4, VOCABULARY)


def bands(b: int, t: int) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.randint(0, VOCABULARY, (b, t), generator=rng),
        "embedding": torch.randn(b, t, 5, generator=rng),
        "per_layer": [torch.randn(b, t, 2, generator=rng) for _ in range(4)],
    }


def given_to_layers(bands: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**bands, "per_layer": of_layer} for of_layer in bands["per_layer"]]


def test_a_row_holds_all_that_layers_are_given() -> None:
    given, hidden = bands(2, 3), torch.randn(2, 3, 16)
    rows = FORMAT.pack(hidden, given_to_layers(given))
    assert rows.shape == (2, 3, FORMAT.width) == (2, 3, ALIGNMENT + ID_DIGITS)  # 16 + 3 + 5 + 4 * 2, then zeros
    assert torch.equal(FORMAT.hidden_of(rows), hidden)
    for layer in range(4):
        assert torch.equal(FORMAT.band_of(rows, IDS, layer), given["input_ids"])
        assert torch.equal(FORMAT.band_of(rows, EMBEDDING, layer), given["embedding"])
        assert torch.equal(FORMAT.band_of(rows, OF_EACH, layer), given["per_layer"][layer])
    assert not FORMAT.band_of(rows, ROUTER, 1).any(), "nothing before the first layer"
    after = FORMAT.pass_on(rows, 2 * hidden, (None, torch.ones(2, 3, 3)))
    assert torch.equal(FORMAT.hidden_of(after), 2 * hidden)
    assert FORMAT.band_of(after, ROUTER, 1).all()
    assert torch.equal(after[..., 19:], rows[..., 19:]), "the rest is passed on"
    assert not FORMAT.refuses(rows) + FORMAT.refuses(after)


@pytest.mark.parametrize("codec", ["raw", "float16", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ids_survive_every_type_and_code(dtype: torch.dtype, codec: str) -> None:
    given = bands(2, 50)
    rows = FORMAT.pack(100 * torch.randn(2, 50, 16), given_to_layers(given)).to(dtype)
    meta, payload = pack(rows, torch.zeros(2, 50, dtype=torch.int32), None, codec)
    received, _, _ = unpack_untrusted(meta, memoryview(payload))
    assert not FORMAT.refuses(received)
    assert torch.equal(FORMAT.band_of(received, IDS, 0), given["input_ids"])


def test_digits_share_a_scale_with_nothing_else() -> None:
    assert ALIGNMENT % INT8_BLOCK == ALIGNMENT % INT4_BLOCK == 0
    assert ID_DIGITS <= INT4_BLOCK


def test_what_is_no_id_of_the_vocabulary_is_refused() -> None:
    rows = FORMAT.pack(torch.zeros(1, 2, 16), given_to_layers(bands(1, 2)))
    for wrong in (0.5, -1.0, 4.0):
        spoiled = rows.clone()
        spoiled[0, 1, -2] = wrong
        assert FORMAT.refuses(spoiled) == "input_ids holds what is no id of a token"
    beyond = FORMAT.pack(
        torch.zeros(1, 1, 16), given_to_layers({**bands(1, 1), "input_ids": torch.tensor([[VOCABULARY]])})
    )
    assert FORMAT.refuses(beyond) == "input_ids holds id 250000, and the vocabulary has 250000 tokens"


def test_what_a_client_lacks_or_has_in_another_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match="input_ids is needed beside hidden states, and inputs_embeds do not say it"):
        FORMAT.pack(torch.zeros(1, 2, 16), given_to_layers({**bands(1, 2), "input_ids": None}))
    with pytest.raises(ConfigError, match=r"embedding is \(1, 2, 4\), expected \(1, 2, 5\)"):
        FORMAT.pack(torch.zeros(1, 2, 16), given_to_layers({**bands(1, 2), "embedding": torch.zeros(1, 2, 4)}))


def test_most_families_send_hidden_states_alone() -> None:
    plain, hidden = RowFormat(EACH_LAYER, 16, 4, VOCABULARY), torch.randn(1, 2, 16)
    assert plain.width == 16
    assert plain.pack(hidden, []) is hidden is plain.pass_on(hidden, hidden, ())
    assert not plain.refuses(hidden)


@pytest.mark.filterwarnings("ignore")  # what a family warns of is its own affair
def test_several_threads_may_use_one_clients_model(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = families.make_named("gemma4_text", tmp_path)
    families.lay_out(folder)
    model = load_client_part(folder, torch.float32)
    remote = skeleton.remote_layer_of(model)
    meet = threading.Barrier(2, timeout=20)
    found: dict[int, torch.Tensor] = {}

    def note(rows: torch.Tensor) -> torch.Tensor:
        found[threading.get_ident()] = rows.clone()
        return rows

    remote.call = note
    first = skeleton.decoder_layers(model)[0]
    forward = first.forward

    def wait_for_the_other(*args: Any, **kwargs: Any) -> Any:
        meet.wait()  # both are in the midst of a pass
        return forward(*args, **kwargs)

    first.forward = wait_for_the_other
    texts = [torch.tensor([[3, 5, 8]]), torch.tensor([[90, 17, 44]])]
    rows: list[torch.Tensor] = [torch.empty(0)] * 2

    def run(index: int) -> None:
        with torch.no_grad():
            model(input_ids=texts[index], use_cache=False)
        rows[index] = found[threading.get_ident()]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first.forward = forward
    for index, text in enumerate(texts):
        with torch.no_grad():
            model(input_ids=text, use_cache=False)
        assert torch.equal(rows[index], found[threading.get_ident()])
