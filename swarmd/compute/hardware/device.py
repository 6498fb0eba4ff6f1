"""What is computed on, and what it is called."""

from __future__ import annotations

import psutil
import torch

from swarmd.errors import ConfigError


def pick_device(wanted: str = "") -> str:
    """The device that was asked for, as torch names it; else CUDA, then MPS, then the CPU. Raises ConfigError."""
    if wanted:
        try:
            torch.empty(0, device=wanted)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"the device {wanted!r} cannot be used here: {reason}") from None
        return wanted
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def device_description(device: str) -> tuple[str, int | None]:
    """Name a device for people, and its memory in bytes where it has its own."""
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        return properties.name, int(properties.total_memory)
    return device, None


def finish(device: torch.device) -> None:
    """Wait until a device has computed what it was asked to; until then nobody knows how long that takes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


class OwnerReserve:
    """Memory that this process leaves to the machine's owner, in bytes; of all that it computes on."""

    n_bytes = 0


def free_memory_bytes(device: str) -> int:
    """What this process may still allocate on a device."""
    if device.startswith("cuda"):
        kept_for_itself = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = int(torch.cuda.mem_get_info(device)[0]) + kept_for_itself
    else:
        free = int(psutil.virtual_memory().available)
    return max(0, free - OwnerReserve.n_bytes)
