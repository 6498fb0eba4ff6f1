"""A checkpoint's configuration, of what is plain in it, and a guard of whatever is built of such files.

Who only reads a tokenizer needs nothing else of a model: with its modules the import takes twice as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig

import swarmd.compute.model.packed_config  # noqa: F401 - transformers learns the type
from swarmd.errors import ConfigError, SwarmError
from swarmd.protocol.models import configuration, manifest


def quiet() -> None:
    """Keep transformers' progress bars and advice off the terminal."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


quiet()


def read_config(folder: Path) -> PretrainedConfig:
    """Build a checkpoint's configuration of what is plain in it. Raises ConfigError for what makes no sense.

    transformers sees neither the file nor its folder: nothing in it can name code, a package or a place.
    """
    path = folder / "config.json"
    written = manifest.read_config(folder)
    family = written["model_type"]
    if family not in CONFIG_MAPPING:
        raise ConfigError(f"{path}: unsupported family: transformers knows no {family[:64]!r}")
    kind = CONFIG_MAPPING[family]
    fields = getattr(kind, "__dataclass_fields__", {})
    plain = configuration.rebuild_plain(written)
    family_fields = fields.keys() - PretrainedConfig.__dataclass_fields__.keys()
    # A field of the family's own that is not plain would be left out, and the model would be another one: refuse it.
    left_out = family_fields & written.keys() - plain.keys()
    unreadable = sorted(name for name in left_out if written[name] != fields[name].default)
    if unreadable:
        name = unreadable[0]
        value = str(written[name])[:40]
        raise ConfigError(f"{path}: {name} is {value!r}, expected numbers, flags, and words of letters and digits")
    # Names that are neither fields nor attributes may stay; those of methods would overwrite code.
    foreign = plain.keys() - fields.keys()
    methods = {name for name in foreign if callable(getattr(kind, name, None))}
    settings = {name: value for name, value in plain.items() if name not in methods}
    with building(f"{path}: not a configuration of {family}"):
        return kind.from_dict(settings)


@contextmanager
def building(trouble: str) -> Iterator[None]:
    """Guard a block that builds something of what anybody may have written.

    Each family fails in its own way; here all become one sentence. Raises ConfigError, ``trouble`` and the reason,
    for whatever was raised inside.
    """
    try:
        yield
    except SwarmError:
        raise
    except Exception as error:  # noqa: BLE001 - a configuration that makes no sense fails anywhere, with anything
        reason = " ".join(str(error).split())[:300]
        if isinstance(error, KeyError):  # says but a name
            reason = f"transformers knows no {reason} there"
        raise ConfigError(f"{trouble}: {reason or type(error).__name__}") from None
