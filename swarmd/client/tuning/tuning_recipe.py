"""What a fine-tuning run is asked for, and its checkpoints. No torch: a wrong option is refused at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from swarmd.errors import ConfigError
from swarmd.protocol.wire.tensors import CHANGES, CODECS

METHODS = ("lora", "prompt", "prefix")
PREFIX = "checkpoint-"


@dataclass(frozen=True, slots=True)
class TuningRecipe:
    """What decides the result. ``targets`` of LoRA are names of modules, or PEFT's own choice for the family."""

    model: str
    method: str = "lora"
    steps: int = 100
    batch: int = 8
    learning_rate: float = 1e-3
    warmup: int = 10
    seed: int = 0
    rank: int = 8
    alpha: int = 16
    targets: tuple[str, ...] = ()
    virtual_tokens: int = 16
    max_length: int = 256
    codec: str = "auto"

    def check(self) -> TuningRecipe:
        """Return the recipe if it can be right. Raises ConfigError."""
        if self.method not in METHODS:
            raise ConfigError(f"--method is one of {', '.join(METHODS)}, not {self.method!r}")
        for name in ("steps", "batch", "rank", "virtual_tokens", "max_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is at least 1, got {getattr(self, name)}")
        codecs = ("auto", *CODECS, CHANGES)
        if self.codec not in codecs:
            raise ConfigError(f"--codec is one of {', '.join(codecs)}, not {self.codec!r}")
        if not 0 < self.learning_rate < math.inf or self.alpha < 1:
            raise ConfigError(f"--lr and --alpha are positive, got {self.learning_rate} and {self.alpha}")
        return self


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, the newest first."""
    folders = [path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]
    return sorted(folders, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was written, by its name."""
    return int(checkpoint.name.removeprefix(PREFIX))
