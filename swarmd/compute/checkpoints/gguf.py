"""A GGUF file, as most people have their models, made a folder of safetensors: once, by transformers' own reader.

Its blocks of 4 to 8 bits become plain numbers; how much rounding these to 16 bits costs is measured, and said. What the
reader passes over is read here (``gguf_settings``, ``gguf_tokenizer``) or refused by name: each tensor of the file is
used, and each parameter filled. Asks nothing of any network: weights that stay packed would need kernels of the hub.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map
from transformers.utils.quantization_config import GgufConfig

from swarmd.compute.checkpoints.gguf_settings import ONE_READER, changes, check_settings, used_here
from swarmd.compute.checkpoints.gguf_tokenizer import check_words, mend
from swarmd.compute.llama_cpp.gguf_header import GgufHeader, read_header
from swarmd.compute.model.plain_config import building
from swarmd.errors import ConfigError
from swarmd.resources import measure_memory

DTYPES = ("auto", "float32", "bfloat16", "float16")
SHARD = "2GB"  # of safetensors: what one read of a server's span touches at most
NOT_OURS = ("quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version")
"""Of a configuration: packages, places, and what would make another model of the same file."""
LINK = "model.gguf"  # what the file is called where the reader finds it
BESIDE = ("adapter_config.json", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class Conversion:
    """What became of a file: ``loss`` is the worst tensor's, the norm of what rounding took by the tensor's own."""

    n_parameters: int
    dtype: str
    loss: float


def convert(
    path: Path,
    folder: Path,
    dtype: str,
    say: Callable[[str], None],
) -> Conversion:
    """Write the model in ``path`` to ``folder``: weights, configuration, tokenizer with its chat template.

    ``dtype`` "auto" takes the smaller of those that lose nothing, else float16. Raises ConfigError for a file that is
    none, is damaged, holds a family or a format that transformers does not read, or needs more memory than there is.
    """
    header = read_header(path)
    check_settings(header)
    check_words(header, say)
    ignored_files = [name for name in BESIDE if (path.parent / name).is_file()]
    if ignored_files:
        say(f"{', '.join(ignored_files)} beside it is not looked at: the file alone is the model")
    with tempfile.TemporaryDirectory() as temporary, building(f"{path} cannot be read as GGUF"):
        (Path(temporary) / LINK).symlink_to(path.resolve())  # the reader would take an adapter or a tokenizer beside it
        model = _read_model(header, Path(temporary), folder, say)
    tied_names = _tied_names(model)
    state = model.state_dict()
    state = {name: state[name] for name in state if name not in tied_names}
    dtype_name = dtype if dtype != "auto" else _smallest_dtype(state)
    chosen: torch.dtype = getattr(torch, dtype_name)
    loss = max(_rounding_loss(tensor, chosen) for tensor in state.values())
    say(f"writing {dtype_name} ...")
    rounded = {}
    for name, tensor in state.items():
        rounded[name] = tensor.to(chosen).contiguous()
    save_torch_state_dict(rounded, folder, max_shard_size=SHARD)
    model.generation_config.save_pretrained(folder)
    config = model.config.to_dict()
    config = {name: config[name] for name in config if name not in NOT_OURS}
    config |= {"dtype": dtype_name, "architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    n_parameters = sum(tensor.numel() for tensor in state.values())
    return Conversion(n_parameters, dtype_name, loss)


def _read_model(
    header: GgufHeader,
    place: Path,
    folder: Path,
    say: Callable[[str], None],
) -> Any:
    """Read the model in 32 bits, and write its tokenizer to ``folder``. Raises ConfigError."""
    source = {"pretrained_model_name_or_path": place, "gguf_file": LINK, "local_files_only": True}
    config = AutoConfig.from_pretrained(**source)  # handed on: reading a vocabulary takes seconds each time
    if changed := changes(header, config):
        config = type(config).from_dict({**config.to_dict(), **changed})
    _check_memory(header.path, config)
    _check_all_is_used(header, config)
    say("reading the tokenizer ...")
    tokenizer = AutoTokenizer.from_pretrained(**source, config=config)
    mend(tokenizer, header)
    tokenizer.save_pretrained(folder)
    say("unpacking the weights ...")
    model, info = AutoModelForCausalLM.from_pretrained(
        **source,
        config=config,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),  # else transformers asks the hub for kernels, which are code
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    faults = {
        "lacks tensors for": info["missing_keys"],
        "holds what no part of the model takes:": info["unexpected_keys"],
        "has other shapes than its settings say for": [name for name, *_ in info["mismatched_keys"]],
    }
    for fault, names in faults.items():
        if names:
            raise ConfigError(f"{header.path} {fault} {', '.join(sorted(names)[:3])}: {len(names)} in all")
    return model


def _check_all_is_used(header: GgufHeader, config: Any) -> None:
    """Refuse a file with a tensor that the reader passes over, which its older part never says. Raises ConfigError."""
    if header.architecture in ONE_READER:
        return  # the newer part says what it does not expect
    with torch.device("meta"):
        hollow = AutoModelForCausalLM.from_config(config)
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=config.to_dict())
    known = get_gguf_hf_weights_map(hollow, processor).keys() | used_here(header)
    unknown = header.tensors.keys() - known
    unused = sorted(name for name in unknown if name.removesuffix(".weight") not in known)
    if unused:
        raise ConfigError(
            f"{header.path}: a {header.architecture} as its settings describe it has no place for "
            f"{', '.join(unused[:3])} ({len(unused)} in all): leaving tensors out would make another model"
        )


def _check_memory(path: Path, config: Any) -> None:
    """Refuse what does not fit: all of it is in memory at once, in 32 bits and then in what is written."""
    with torch.device("meta"):
        n_parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    needed = 6 * n_parameters
    free = measure_memory().free_bytes
    if needed > free:
        raise ConfigError(
            f"{path} has {n_parameters / 1e9:.1f} billion parameters: unpacking it takes {needed / 2**30:.1f} GiB of "
            f"memory, and {free / 2**30:.1f} are free; convert it on a larger machine, or take the model from the hub"
        )


def _tied_names(model: Any) -> set[str]:
    """Return the names that mean the tensor of another name."""
    return set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()


def _smallest_dtype(state: dict[str, torch.Tensor]) -> str:
    """Return the smallest dtype that holds every number as it is; float16 where none does, if its range is enough."""
    for name in ("bfloat16", "float16"):
        dtype: torch.dtype = getattr(torch, name)
        tensors = state.values()
        rounded = ((tensor, tensor.to(dtype).float()) for tensor in tensors)
        if all(torch.equal(tensor, same) for tensor, same in rounded):
            return name
    largest = max(float(tensor.abs().max()) for tensor in state.values())
    return "float16" if largest < torch.finfo(torch.float16).max else "bfloat16"


def _rounding_loss(tensor: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the norm of what rounding takes away, relative to the tensor's own."""
    norm = float(tensor.norm())
    error = float((tensor - tensor.to(dtype).float()).norm())
    return error / norm if norm else 0.0
