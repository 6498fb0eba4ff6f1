"""Slices of a family's blocks add up to the whole: hidden states, gradients, and the tokens of a greedy text.

Gradients by what enters, by LoRA matrices on all that a block has, and by a prefix where its caches are plain.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from swarmd.compute.model import skeleton
from swarmd.compute.model.ends import Ends
from swarmd.compute.passes.span import LoadedSpan
from swarmd.compute.serving.client_parameters import read_tuned_untrusted
from swarmd.errors import ConfigError
from swarmd.protocol.models.configuration import layout_of
from swarmd.protocol.models.manifest import read_config
from swarmd.values import Span
from tests.compute.teams.thread_team import PLAIN, ThreadTeam
from tests.families import SERVED, VARIANTS, VOCABULARY, lay_out, make_named

pytestmark = pytest.mark.filterwarnings("ignore")  # what a family warns of is its own affair
N_PROMPT, N_TOKENS, N_PREFIX = 9, 5, 3
Gradients = dict[str, torch.Tensor]
"""By the names of what they are of."""
TOLERANCE = 1e-5  # relative to the largest number
TOLERANCES = {
    "hy_v4": 1e-3,
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_text with shared keys", "gemma4_text with experts"), 5e-5),
}
"""Of families whose numbers grow from block to block."""
WITHOUT_A_PLAN = {
    *("bitnet", "bloom", "codegen", "diffllama", "falcon", "falcon_mamba", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo"),
    *("gpt_neox_japanese", "gptj", "jetmoe", "lfm3", "lfm3_vl", "mamba", "mamba2", "modernbert-decoder", "molmo2"),
    *("moshi", "mpt", "opt", "persimmon", "stablelm", "xglm", "zaya"),
}
REFUSED = {
    **dict.fromkeys(WITHOUT_A_PLAN, "it is not known how matrices"),
    "doge": "size of tensor",
    "inkling_text": "plan says all_reduce",
    "inkling_mm_model": "plan says all_reduce",
    "longcat_flash": "plan says moe_identity_expert",
    "glm5_next": "cannot be multiplied",
    "qwen4_exp with per-layer embeddings": "plan says embedding_colwise",
}
IN_CI = {"llama", "qwen3_moe", "deepseek_v3", "phi3", "minimax_m2", "gpt_oss"}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def whole_of(folder: Path) -> Span:
    config = read_config(folder)
    return Span(0, layout_of(config).n_blocks(skeleton.count_layers(skeleton.read_config(folder))))


def greedy(span: LoadedSpan, folder: Path) -> list[int]:
    """The tokens that follow a prompt, by a session's cache."""
    tokens = torch.randint(3, VOCABULARY, (N_PROMPT,), generator=torch.Generator().manual_seed(5)).tolist()
    ends, cache, n_past = Ends(folder, torch.float32), span.new_cache(), 0
    for _ in range(N_TOKENS):
        new = tokens[n_past:]
        (rows,) = ends.embed([new], [n_past])
        out = span.forward(rows, torch.arange(n_past, len(tokens))[None], None, cache, n_past)
        n_past = len(tokens)
        tokens.append(int(ends.logits(out[0], span.layer_arity)[-1].argmax()))
    return tokens[N_PROMPT:]


def sizes_of_matrices(span: LoadedSpan, rows: torch.Tensor, positions: torch.Tensor) -> dict[str, tuple[int, int]]:
    """Sizes of what enters and leaves the matrices of blocks that all tokens pass once."""
    sizes: dict[str, list[tuple[int, int]]] = {}

    def note(name: str, _: nn.Module, args: tuple[torch.Tensor], out: Any) -> None:
        if torch.is_tensor(out) and args[0][..., 0].numel() == positions.numel():
            sizes.setdefault(name, []).append((args[0].shape[-1], out.shape[-1]))

    linear = {name: part for name, part in span.model.named_modules() if isinstance(part, nn.Linear)}
    hooks = [part.register_forward_hook(partial(note, name)) for name, part in linear.items()]
    with torch.no_grad():
        span.forward_with_grad(rows, positions)
    for hook in hooks:
        hook.remove()
    return {
        name: each[0] for name, each in sizes.items() if len(each) == 1 and span.adapters.block_of(name) is not None
    }


def parameters_for(span: LoadedSpan, rows: torch.Tensor, positions: torch.Tensor) -> bytes:
    """A client's parameters for all that a span's blocks can have of them."""
    rng = torch.Generator().manual_seed(4)
    tensors = {}
    for name, (n_in, n_out) in sizes_of_matrices(span, rows, positions).items():
        tensors[f"{name}.lora_A"] = torch.randn(2, n_in, generator=rng) / n_in**0.5
        tensors[f"{name}.lora_B"] = torch.randn(n_out, 2, generator=rng) / n_out**0.5
    prefix = {}
    for block, layer in zip(span.span.blocks(), span.example_cache(span.span).owned, strict=False):
        shape = getattr(getattr(layer, "keys", None), "shape", (0, 0, 0, 0))
        for part in ("keys", "values"):
            prefix[f"{block}.{part}"] = torch.randn(1, shape[1], N_PREFIX, shape[3], generator=rng)
    for each in ({**tensors, **prefix}, tensors):
        with suppress(ConfigError):
            raw = safetensors.torch.save(each)
            read_tuned_untrusted(span, span.span, raw)
            return raw
    return b""


def tune(span: LoadedSpan, raw: bytes, rows: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor) -> Gradients:
    """Gradients by all of a client's parameters."""
    tuned = read_tuned_untrusted(span, span.span, raw)
    leaves = {name: leaf for block in tuned.leaves.values() for name, leaf in block.items()}
    cache = None
    if tuned.n_prefix:
        cache = span.new_cache(with_gradients=True)
        tuned.fill(cache, span.span.blocks(), rows.shape[0])
    places = positions + tuned.n_prefix
    out = span.family.format.hidden_of(span.forward_with_grad(rows, places, None, None, tuned.lora, cache))
    loss = (out * weight[..., : out.shape[-1]]).sum()
    gradients = torch.autograd.grad(loss, [*leaves.values()], allow_unused=True)
    return {name: each for name, each in zip(leaves, gradients, strict=True) if each is not None}


def assert_slices_add_up(folder: Path, weights: tuple[float, ...], tolerance: float = TOLERANCE) -> None:
    every = whole_of(folder)
    whole, team = LoadedSpan(folder, every, torch.float32, PLAIN), ThreadTeam(folder, every, weights)
    ids = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
    entering = torch.cat(Ends(folder, torch.float32).embed(ids.tolist(), [0, 0]))
    positions = torch.arange(7).expand(2, -1)
    weight = torch.randn(entering.shape, generator=torch.Generator().manual_seed(2))

    def compute(span: LoadedSpan) -> tuple[torch.Tensor, torch.Tensor]:
        rows = entering.clone().requires_grad_()
        out = span.family.format.hidden_of(span.forward_with_grad(rows, positions))
        (gradient,) = torch.autograd.grad((out * weight[..., : out.shape[-1]]).sum(), rows)
        return out.detach(), span.family.format.hidden_of(gradient)

    expected, results = compute(whole), team.run(compute)
    for out, gradient in results:
        assert torch.equal(out, results[0][0]), "members have the same, to the bit"
        assert error_of(out, expected[0]) < tolerance
        assert error_of(gradient, expected[1]) < tolerance
    raw = parameters_for(whole, entering, positions)
    wanted = tune(whole, raw, entering, positions, weight)
    assert len(wanted) >= 2 * len(every), "every block has something that is trained"
    for gradients in team.run(lambda span: tune(span, raw, entering, positions, weight)):
        assert gradients.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert error_of(gradients[name], gradient) < 10 * tolerance, name
    texts = team.run(lambda span: greedy(span, folder))
    assert texts == [greedy(whole, folder)] * len(weights)


def error_of(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(
    "family", [f if f in IN_CI else pytest.param(f, marks=pytest.mark.prove) for f in sorted({*SERVED, *VARIANTS})]
)
def test_slices_of_a_family_add_up_or_it_is_refused(family: str, tmp_path: Path) -> None:
    folder = make_named(family, tmp_path)
    lay_out(folder)
    if family in REFUSED:
        with pytest.raises((ConfigError, RuntimeError), match=REFUSED[family]):
            assert_slices_add_up(folder, (1, 2))
        return
    assert_slices_add_up(folder, (1, 2), TOLERANCES.get(family, TOLERANCE))
    assert_slices_add_up(folder, (1, 2, 6), TOLERANCES.get(family, TOLERANCE))
