"""Settings of a daemon: defaults, then ``config.toml`` in the home folder, then ``SWARMD_*``, then flags.

Frozen, with units in the names. Whatever cannot be right is refused here with the name of the setting.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from swarmd.errors import ConfigError
from swarmd.values import Span

DEFAULT_LISTEN = "/ip4/0.0.0.0/tcp/4117"
DTYPES = ("float32", "bfloat16", "float16")
QUANTIZE = ("none", "int8", "nf4")
TRAINING = ("asked", "off")


@dataclass(frozen=True, slots=True)
class Config:
    """Everything a daemon can be told.

    ``direct`` offers direct channels beside libp2p, on ``direct_port`` or, if that is 0, on any free one.
    ``max_blocks`` bounds what "auto" takes; 0 is as many as fit.
    ``balance`` lets a server with automatic blocks move to others that the swarm lacks.
    ``listen`` and ``announce`` are multiaddrs, comma-separated; ``blocks`` is START:END or "auto";
    ``disk_limit_gib`` bounds the weights that swarmd keeps, ``up_limit_mbit`` and ``down_limit_mbit`` how fast weights
    travel; 0 is no limit.
    ``quantize`` keeps the blocks' matrices in 8 or 4 bits, ``dtype`` is what everything else is computed in.
    ``hub`` lets weights of models that came from the Hugging Face hub be fetched there too.
    ``training_mib`` bounds what fine-tuning may keep in the worker's memory, 0 takes no training work;
    ``training_share`` is how much of its time fine-tuning may take while sessions decode.
    ``training`` says whether this machine takes part in training runs: "asked" (only in those that its user joined)
    or "off".
    ``cache_tokens`` bounds what sessions may reserve, ``history_mib`` the memory for replay before it spills to disk.
    """

    listen: str = DEFAULT_LISTEN
    announce: str = ""
    blocked_peers: str = ""
    exchange: bool = True
    direct: bool = True
    direct_port: int = 0
    serve: bool = True
    model: str = ""
    blocks: str = "auto"
    max_blocks: int = 0
    balance: bool = True
    balance_interval_s: int = 60
    dtype: str = "float32"
    quantize: str = "none"
    threads: int = 0
    cache_tokens: int = 131_072
    history_mib: int = 512
    training_mib: int = 512
    training_share: float = 0.2
    training: str = "asked"
    disk_limit_gib: float = 0.0
    up_limit_mbit: float = 0.0
    down_limit_mbit: float = 0.0
    hub: bool = True

    @property
    def span(self) -> Span | None:
        return None if self.blocks == "auto" else Span.parse(self.blocks)

    def check(self) -> Config:
        """Return the settings if they can be right. Raises ConfigError."""
        for name, known in (("dtype", DTYPES), ("quantize", QUANTIZE), ("training", TRAINING)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is one of {', '.join(known)}, not {getattr(self, name)!r}")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not 0 <= value < float("inf"):
                raise ConfigError(f"{field.name} cannot be negative or infinite, got {value}")
        if self.training_share > 1:
            raise ConfigError(f"training_share is a part of 1, got {self.training_share}")
        _ = self.span
        return self


def split(text: str) -> tuple[str, ...]:
    """Cut a comma-separated setting."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def load(folder: Path, environment: Mapping[str, str] = os.environ, **flags: Any) -> Config:
    """Gather the settings; flags that are None were not given. Raises ConfigError."""
    config = Config()
    path = folder / "config.toml"
    if path.is_file():
        try:
            config = _apply(config, tomllib.loads(path.read_text()), str(path))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: {error}") from None
    names = {f.name for f in fields(Config)}
    from_environment = {n: v for n in names if (v := environment.get(f"SWARMD_{n.upper()}")) is not None}
    config = _apply(config, from_environment, "the environment")
    return _apply(config, {k: v for k, v in flags.items() if v is not None}, "the command line").check()


def _apply(config: Config, values: Mapping[str, Any], source: str) -> Config:
    types = {f.name: type(getattr(config, f.name)) for f in fields(Config)}
    changes: dict[str, Any] = {}
    for name, value in values.items():
        if name not in types:
            raise ConfigError(f"{source}: unknown setting {name!r}; there are: {', '.join(sorted(types))}")
        changes[name] = _convert(name, value, types[name], source)
    return replace(config, **changes)


def _convert(name: str, value: Any, kind: type, source: str) -> Any:
    if kind is bool and isinstance(value, str):
        if value.lower() in ("1", "true", "yes", "0", "false", "no"):
            return value.lower() in ("1", "true", "yes")
    elif kind is int and isinstance(value, str) and value.lstrip("-").isdigit():
        return int(value)
    elif kind is float and isinstance(value, int | str) and not isinstance(value, bool):
        with suppress(ValueError):
            return float(value)
    elif isinstance(value, kind) and (kind is not int or not isinstance(value, bool)):
        return value
    raise ConfigError(f"{source}: {name} takes a value of type {kind.__name__}, not {value!r}")
