"""Settings of a daemon: defaults, then ``config.toml`` in the home folder, then ``SWARMD_*``, then flags.

Frozen, with units in the names. Whatever cannot be right is refused here with the name of the setting.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from swarmd.errors import ConfigError
from swarmd.hours import Hours
from swarmd.names import HOST_NAME, require_member_name
from swarmd.text_files import read_text
from swarmd.values import Span

logger = logging.getLogger(__name__)

FILE_NAME = "config.toml"  # in the home folder
DEFAULT_LISTEN = "/ip4/0.0.0.0/tcp/4117,/ip6/::/tcp/4117"
DTYPES = ("float32", "bfloat16", "float16")
QUANTIZE = ("none", "int8", "int4", "nf4")
KV_CACHE = ("none", "int8")
MOST_MEMBERS = 64  # of a team
COMPILED = ("auto", "off")


TeamMode = Literal["weights", "auto", "whole"]
"""Members are worth what their owner says, or what is measured; or hold all of the blocks, and share long prompts."""


def parse_team(weights: str) -> tuple[float, ...]:
    """Read what the members of a team are worth: "1:2". Raises ConfigError."""
    parts = weights.split(":") if weights not in ("", "auto", "whole") else []
    if (
        not all(re.fullmatch(r"\d{1,4}(\.\d{1,3})?", part) and float(part) > 0 for part in parts)
        or len(parts) > MOST_MEMBERS
    ):
        raise ConfigError(
            f"team is auto, whole, or for example 1:1 or 1:2:6, up to {MOST_MEMBERS} members with what each is worth, "
            f"not {weights!r}"
        )
    if len(parts) == 1:
        raise ConfigError(f"a team has two members at least, as 1:1 has, not {weights!r}")
    return tuple(map(float, parts))


def format_of(quantize: str, kv_cache: str) -> str:
    """In which bits a server computes and keeps, as it announces that: those of one format can check each other."""
    return quantize if kv_cache == "none" else f"{quantize}+kv_{kv_cache}"


WEIGHTS = (*QUANTIZE, "gguf")  # of records: a GGUF model is served at the bits of its file
FORMATS = tuple(format_of(weights, kv_cache) for kv_cache in KV_CACHE for weights in WEIGHTS)
TRAINING = ("asked", "off")
LOG_FORMATS = ("auto", "text", "json")
GATEWAY_HEADS = ("own", "int8", "swarm")  # what computes logits
HEADS = ("auto", *GATEWAY_HEADS)  # of programs
SUPERVISED = "SWARMD_SUPERVISED"  # in a gateway's environment: its standard input is its daemon's pipe
LONGEST_PAUSE_S = 366 * 86_400  # a machine that is to rest for longer can leave the swarm
LEAST_SHARE = 0.05  # of the time that a server computes: below, sessions take it for dead
MAX_HOSTED = 16  # workers of one daemon; a record is announced for each
_PEER_ID = re.compile(r"12D3KooW[1-9A-HJ-NP-Za-km-z]{44}")
_LOCAL = re.compile(r"(127(\.\d{1,3}){3}|localhost):\d{1,5}")
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


def parse_span(text: str) -> Span:
    """Read blocks as a person types them: ``A:B``. Raises ConfigError."""
    match = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigError(f"blocks are given as START:END with START < END (for example 0:4), not {text!r}")
    return Span(int(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True)
class Serve:
    """What one worker serves: a model ("" is any, by need), which blocks, and how. One table ``[[serve]]``.

    ``team`` has several processes compute the blocks together, each a slice of every block: "1:2" is two, of which the
    second has twice the threads. With ``team_peers`` (peer ids, comma-separated) all but the first are those members'.
    "auto" measures who is there, and takes a team where that is quicker. "whole" has ``team_peers`` hold all of every
    block, and share the work of long prompts.
    ``device`` is a name of torch's ("cuda:1"); "" takes CUDA, then MPS, then the CPU. Models that are served as GGUF
    take "vulkan", "vulkan:1" or "metal", and the CPU for "". With ``head`` a server of a model's last blocks computes
    norm and head, too, for clients that ask. ``compiled`` "off" computes with the library's own kernels only.
    """

    model: str = ""
    blocks: str = "auto"
    max_blocks: int = 0
    dtype: str = "float32"
    quantize: str = "none"
    kv_cache: str = "none"
    head: bool = False
    compiled: str = "auto"
    threads: int = 0
    cache_tokens: int = 131_072
    device: str = ""
    team: str = ""
    team_peers: str = ""

    @property
    def members(self) -> tuple[float, ...]:
        """What each process of a team is worth; none where one computes alone. Raises ConfigError."""
        return parse_team(self.team)

    @property
    def team_mode(self) -> TeamMode:
        """What its team is chosen by, where it has one."""
        return "auto" if self.team == "auto" else "whole" if self.team == "whole" else "weights"

    @property
    def format(self) -> str:
        """Its bits, as a server announces them."""
        return format_of(self.quantize, self.kv_cache)

    @property
    def span(self) -> Span | None:
        """The blocks that are set; None where the daemon chooses. Raises ConfigError."""
        return None if self.blocks == "auto" else parse_span(self.blocks)


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """The table ``[gateway]``: ``on`` has the daemon start one. ``listen`` is HOST:PORT.

    ``hosts`` are names that it is called by beside those of this machine, ``origins`` pages that may ask it (both
    comma-separated); ``running`` answers at a time, ``waiting`` requests that wait for a turn. A conversation's caches
    are kept for ``kept_minutes`` where memory allows. ``head`` "int8" computes the models' heads in 8 bits. ``device``
    may compute them: "" is a card where there is one and it is faster, "cpu" never one, "cuda:1" that one. ``names``, a
    table of its own, has a model of the swarm for each name that programs ask for; "*" stands for any other.
    """

    on: bool = False
    listen: str = "127.0.0.1:4180"
    hosts: str = ""
    origins: str = ""
    running: int = 16
    waiting: int = 64
    kept_minutes: float = 60.0
    head: str = "own"
    device: str = ""
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """The table ``[policy]``: when this machine works for others. What cannot be checked here counts as broken.

    ``hours`` as ``mon-fri 22:00-08:00, sat, sun``, local time, "" is always; ``idle_minutes`` since keyboard or mouse
    was used, 0 does not look; ``not_while`` names programs, comma-separated; ``hottest_c`` is of CPU and NVIDIA cards,
    in °C, 0 does not look. ``up_mbit`` and ``down_mbit`` bound all that leaves or enters the home network, in Mbit/s,
    ``month_gib`` both together in a month; 0 is no limit. ``compute_share`` of the time its processor or card computes
    for others; ``leave_free_gib`` of the memory of what computes (the card's, or the machine's) stays its owner's.
    """

    hours: str = ""
    idle_minutes: int = 0
    on_battery: bool = False
    not_while: str = ""
    hottest_c: float = 0.0
    up_mbit: float = 0.0
    down_mbit: float = 0.0
    month_gib: float = 0.0
    compute_share: float = 1.0
    leave_free_gib: float = 0.0


@dataclass(frozen=True, slots=True)
class Config:
    """Everything a daemon can be told.

    ``name`` is what members are told that this machine is called: "auto" is the host's name, "" is none.
    ``direct`` offers direct channels beside libp2p, on ``direct_port`` or, if that is 0, on any free one.
    ``upnp`` asks the router to forward a port where members cannot connect (by PCP and NAT-PMP, too).
    ``relay`` connects members that nobody can dial to others, where this machine can be dialled.
    ``model`` may name several, comma-separated: each gets a worker of its own. ``hosted``, the tables ``[[serve]]``,
    says more of each; what a table leaves out is as the setting of that name.
    ``max_blocks`` bounds what "auto" takes; 0 is as many as fit.
    ``balance`` lets a server with automatic blocks move to others that the swarm lacks.
    ``listen`` and ``announce`` are multiaddrs, comma-separated; ``blocks`` is START:END or "auto";
    ``disk_limit_gib`` bounds the weights that swarmd keeps, ``up_limit_mbit`` and ``down_limit_mbit`` how fast weights
    travel; 0 is no limit.
    ``quantize`` keeps the blocks' matrices in 8 or 4 bits, ``kv_cache`` sessions' keys and values in 8; ``dtype`` is
    what everything else is computed in. ``compiled`` lets code be compiled for this CPU: auto or off.
    ``metrics`` is HOST:PORT of this machine where Prometheus may ask, "" is nowhere; ``log_format``: auto (for journald
    where it reads, else text), text or json.
    ``hub`` lets weights of models that came from the Hugging Face hub be fetched there too.
    ``tuning_mib`` bounds what fine-tuning may keep in the worker's memory, 0 takes no such work;
    ``tuning_share`` is how much of its time fine-tuning may take while sessions decode.
    ``training_runs`` says whether this machine takes part in training runs: "asked" (only in those that its user
    joined) or "off".
    ``team`` has several processes compute blocks together, and ``team_peers`` those of other machines (see Serve).
    ``follow`` lists members (peer ids, comma-separated) whose teams this machine takes part in.
    ``cache_tokens`` bounds what sessions may reserve, ``history_mib`` the memory for replay before it spills to disk.
    """

    name: str = HOST_NAME
    listen: str = DEFAULT_LISTEN
    announce: str = ""
    blocked_peers: str = ""
    exchange: bool = True
    direct: bool = True
    direct_port: int = 0
    relay: bool = True
    upnp: bool = True
    metrics: str = ""
    log_format: str = "auto"
    serve: bool = True
    model: str = ""
    blocks: str = "auto"
    max_blocks: int = 0
    balance: bool = True
    balance_interval_s: int = 60
    dtype: str = "float32"
    quantize: str = "none"
    kv_cache: str = "none"
    head: bool = False
    compiled: str = "auto"
    threads: int = 0
    device: str = ""
    team: str = ""
    team_peers: str = ""
    follow: str = ""
    cache_tokens: int = 131_072
    history_mib: int = 512
    tuning_mib: int = 512
    tuning_share: float = 0.2
    training_runs: str = "asked"
    disk_limit_gib: float = 0.0
    up_limit_mbit: float = 0.0
    down_limit_mbit: float = 0.0
    hub: bool = True
    hosted: tuple[Serve, ...] = ()
    gateway: GatewayConfig = GatewayConfig()
    policy: PolicyConfig = PolicyConfig()

    def to_host(self) -> tuple[Serve, ...]:
        """What this daemon serves, one entry for each worker; none with ``serve`` false."""
        if not self.serve:
            return ()
        if self.hosted:
            return self.hosted
        names = [field.name for field in fields(Serve) if field.name != "model"]
        settings = {name: getattr(self, name) for name in names}
        return tuple(Serve(model, **settings) for model in split(self.model) or ("",))

    def check(self) -> Config:
        """Return the settings if they can be right. Raises ConfigError."""
        for setting in fields(self):
            value = getattr(self, setting.name)
            if isinstance(value, int | float) and not 0 <= value < float("inf"):
                raise ConfigError(f"{setting.name} cannot be negative or infinite, got {value}")
        require_member_name(self.name)
        _check_choice("training_runs", self.training_runs, TRAINING)
        _check_choice("log_format", self.log_format, LOG_FORMATS)
        if self.metrics and not _LOCAL.fullmatch(self.metrics):
            raise ConfigError(f"metrics is HOST:PORT of this machine, such as 127.0.0.1:9417, not {self.metrics!r}")
        if self.gateway.running < 1 or self.gateway.waiting < 0:
            raise ConfigError("gateway.running is at least 1, and gateway.waiting not negative")
        if not 0 <= self.gateway.kept_minutes < float("inf"):
            raise ConfigError(f"gateway.kept_minutes cannot be negative or infinite, got {self.gateway.kept_minutes}")
        _check_choice("gateway.head", self.gateway.head, GATEWAY_HEADS)
        _check_device("gateway.device", self.gateway.device)
        _check_policy(self.policy)
        if self.tuning_share > 1:
            raise ConfigError(f"tuning_share is a part of 1, got {self.tuning_share}")
        if self.direct_port > 65_535:
            raise ConfigError(f"direct_port is a TCP port, at most 65535, got {self.direct_port}")
        for name in ("listen", "announce"):
            for address in split(getattr(self, name)):
                _check_address(name, address)
        _check_peers("blocked_peers", self.blocked_peers)
        _check_peers("follow", self.follow)
        models = split(self.model)
        if len(models) > 1 and self.blocks != "auto" and not self.hosted:
            raise ConfigError(
                f"blocks {self.blocks} cannot be those of {len(models)} models: leave --blocks out, or give each model "
                "a table [[serve]] in config.toml"
            )
        for serve in self.to_host() or (Serve(),):
            _check_serve(serve)
        if len(self.to_host()) > MAX_HOSTED:
            raise ConfigError(f"a daemon serves with {MAX_HOSTED} workers at most, not {len(self.to_host())}")
        return self


TableT = TypeVar("TableT", GatewayConfig, PolicyConfig)
TABLES = ("hosted", "gateway", "policy")  # of config.toml: no flag and no variable says all of one
# What settings were called before 0.2; they still count, with a warning.
OLD_NAMES = {"training_mib": "tuning_mib", "training_share": "tuning_share", "training": "training_runs"}


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """Parse what a person wrote. Raises ConfigError that names its ``source`` for what is no TOML."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is no TOML: {error}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Read a file that a person wrote. Raises ConfigError for one that is no TOML."""
    return parse_toml(read_text(path), str(path))


def split(text: str) -> tuple[str, ...]:
    """Cut a comma-separated setting."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


# Four sources, each over the one before: defaults, config.toml, SWARMD_* in the environment, flags. Tables [[serve]]
# take the daemon's own settings for what they leave out, so they are read last, when those are known. A model or blocks
# that are named later than the file would contradict the tables, so then the tables do not count.
def load(
    folder: Path,
    environment: Mapping[str, str] = os.environ,
    **flags: Any,
) -> Config:
    """Gather the settings; flags that are None were not given. Raises ConfigError."""
    path = folder / FILE_NAME
    written = read_toml(path) if os.path.lexists(path) else {}
    return gather(written, str(path), environment, **flags)


def gather(
    written: Mapping[str, Any],
    source: str,
    environment: Mapping[str, str],
    **flags: Any,
) -> Config:
    """Gather the settings from what the file ``source`` says, and what counts more. Raises ConfigError."""
    top = dict(written)
    tables: list[Any] = top.pop("serve") if isinstance(top.get("serve"), list) else []
    gateway = _gateway(top.pop("gateway", {}), source)
    policy = _one_table(top.pop("policy", {}), PolicyConfig(), "policy", source)
    config = _apply(Config(gateway=gateway, policy=policy), top, source)
    names = _setting_types(config, TABLES).keys() | OLD_NAMES.keys()
    variables = {name: environment.get(f"SWARMD_{name.upper()}") for name in sorted(names)}
    from_environment = {name: value for name, value in variables.items() if value is not None}
    config = _apply(config, from_environment, "the environment")
    from_flags = {name: value for name, value in flags.items() if value is not None}
    config = _apply(config, from_flags, "the command line")
    if tables and not {"model", "blocks"} & {
        *from_environment,
        *from_flags,
    }:  # what is said later counts, not the file's
        hosted = [_table(config, table, source) for table in tables]
        config = replace(config, hosted=tuple(hosted))
    return config.check()


def _setting_types(
    defaults: Config | Serve | GatewayConfig | PolicyConfig, without: tuple[str, ...] = ()
) -> dict[str, type]:
    """The names of settings, each with the type of its default."""
    names = [field.name for field in fields(defaults) if field.name not in without]
    return {name: type(getattr(defaults, name)) for name in names}


def _apply(config: Config, values: Mapping[str, Any], source: str) -> Config:
    types = _setting_types(config, TABLES)
    changes: dict[str, Any] = {}
    for setting, value in values.items():
        name = OLD_NAMES.get(setting, setting)
        if name != setting:
            logger.warning("%s: the setting %s is called %s now", source, setting, name)
        if name not in types:
            raise ConfigError(f"{source}: unknown setting {setting!r}; there are: {', '.join(sorted(types))}")
        changes[name] = _convert(setting, value, types[name], source)
    return replace(config, **changes)


def _table(config: Config, table: Any, source: str) -> Serve:
    """One table ``[[serve]]``; what it leaves out is as the daemon's own setting, but for the model."""
    if not isinstance(table, dict):
        raise ConfigError(f"{source}: serve is true, false, or tables [[serve]], not a list that holds {table!r}")
    names = _setting_types(Serve(), ("model", "blocks"))
    defaults = {name: getattr(config, name) for name in names}
    return Serve(**{**defaults, **_settings(table, Serve(), "serve", "[[serve]]", source)})


def _one_table(table: Any, defaults: TableT, name: str, source: str) -> TableT:
    """A table that there is one of; what it leaves out is as in ``defaults``."""
    if not isinstance(table, dict):
        raise ConfigError(f"{source}: {name} is a table [{name}], not {table!r}")
    return replace(defaults, **_settings(table, defaults, name, f"[{name}]", source))


def _gateway(table: Any, source: str) -> GatewayConfig:
    """The table ``[gateway]``, and in it the table of other names. Raises ConfigError."""
    names = table.get("names", {}) if isinstance(table, dict) else {}
    are_texts = isinstance(names, dict) and all(isinstance(value, str) and value for value in names.values())
    if not are_texts:
        raise ConfigError(f'{source}: [gateway.names] has lines like "gpt-5" = "a model of the swarm", not {names!r}')
    others = {name: value for name, value in table.items() if name != "names"} if isinstance(table, dict) else table
    return replace(_one_table(others, GatewayConfig(), "gateway", source), names=names)


def _settings(
    table: dict[str, Any], defaults: Serve | GatewayConfig | PolicyConfig, prefix: str, shown: str, source: str
) -> dict[str, Any]:
    """What a table says, each setting of the type that it has in ``defaults``. Raises ConfigError."""
    types = _setting_types(defaults)
    if unknown := sorted(set(table) - set(types)):
        raise ConfigError(f"{source}: unknown setting {unknown[0]!r} in {shown}; there are: {', '.join(types)}")
    converted = {}
    for name, value in table.items():
        converted[name] = _convert(f"{prefix}.{name}", value, types[name], source)
    return converted


def _check_policy(policy: PolicyConfig) -> None:
    for name in ("idle_minutes", "hottest_c", "up_mbit", "down_mbit", "month_gib", "leave_free_gib"):
        if not 0 <= getattr(policy, name) < float("inf"):
            raise ConfigError(f"policy.{name} cannot be negative or infinite, got {getattr(policy, name)}")
    if not LEAST_SHARE <= policy.compute_share <= 1:
        raise ConfigError(f"policy.compute_share is a part of 1, at least {LEAST_SHARE}, got {policy.compute_share}")
    Hours.parse(policy.hours)


def _check_device(name: str, device: str, others: str = "") -> None:
    if not re.fullmatch(r"([a-z]+(:\d+)?)?", device):
        raise ConfigError(f"{name} is for example cpu or cuda:1{others}, not {device!r}")


def _check_serve(serve: Serve) -> None:
    _check_choice("dtype", serve.dtype, DTYPES)
    _check_choice("quantize", serve.quantize, QUANTIZE)
    _check_choice("kv_cache", serve.kv_cache, KV_CACHE)
    _check_choice("compiled", serve.compiled, COMPILED)
    for name in ("max_blocks", "threads", "cache_tokens"):
        if getattr(serve, name) < 0:
            raise ConfigError(f"serve.{name} cannot be negative, got {getattr(serve, name)}")
    _check_device("device", serve.device, ", or vulkan for GGUF")
    _ = serve.span
    _ = serve.members
    _check_peers("team_peers", serve.team_peers)
    peers = split(serve.team_peers)
    n_peers = len(peers)
    if n_peers != len({*peers}) or n_peers >= MOST_MEMBERS:
        raise ConfigError(
            f"team_peers are up to {MOST_MEMBERS - 1} other members, each once, not {n_peers} with doubles"
        )
    if serve.team not in ("", "auto") and serve.device not in ("", "cpu"):
        raise ConfigError(
            f"a team computes on processors: device is cpu, or team is auto or empty, not {serve.device!r}"
        )
    if serve.team_mode == "whole" and not n_peers:
        raise ConfigError("team whole shares long prompts with team_peers: name them")
    if n_peers and serve.team_mode == "weights" and n_peers + 1 != len(serve.members):
        raise ConfigError(
            f"team says what this machine and {n_peers} team_peers are worth, as {':'.join('1' * (n_peers + 1))} does, "
            f"not {serve.team!r}"
        )


def _check_peers(name: str, text: str) -> None:
    for peer in split(text):
        if not _PEER_ID.fullmatch(peer):
            raise ConfigError(f"{name} lists peer ids (12D3KooW...; swarmd peers shows them), not {peer!r}")


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} is one of {', '.join(known)}, not {value!r}")


def _check_address(name: str, text: str) -> None:
    """A multiaddr of TCP: /ip4/1.2.3.4/tcp/4117, /ip6/..., /dns4/host.example/tcp/4117. Raises ConfigError."""
    if not _is_address(text):
        article = "an" if name.startswith("a") else "a"
        raise ConfigError(f"expected {article} {name} address such as /ip4/192.0.2.7/tcp/4117, not {text!r}")


def _is_address(text: str) -> bool:
    match = re.fullmatch(r"/(ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/(\d{1,5})(?:/p2p/([^/]+))?", text)
    if match is None:
        return False
    kind, host, port, peer = match.groups()
    if int(port) > 65_535 or (peer is not None and not _PEER_ID.fullmatch(peer)):
        return False
    if not kind.startswith("ip"):
        return bool(_HOST_NAME.fullmatch(host))
    try:
        return f"ip{ipaddress.ip_address(host).version}" == kind
    except ValueError:
        return False


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
