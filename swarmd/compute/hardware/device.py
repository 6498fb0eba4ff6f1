"""Devices to compute on: their choice, names, threads and free memory."""

from __future__ import annotations

import torch

from swarmd.errors import ConfigError
from swarmd.resources import count_processors, measure_memory


def pick_device(requested: str = "") -> str:
    """Return the requested device, as torch names it; else CUDA, then MPS, then the CPU. Raises ConfigError."""
    if requested:
        try:
            torch.zeros(1, device=requested).item()
        except (RuntimeError, AssertionError, ImportError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"the device {requested!r} cannot be used here: {reason}") from None
        return requested
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def pick_card(requested: str = "") -> torch.device | None:
    """Return the device that ``pick_device`` does; None where that is the CPU. Raises ConfigError."""
    device = torch.device(pick_device(requested))
    return None if device.type == "cpu" else device


def device_description(device: str) -> tuple[str, int | None]:
    """Name a device for people, and its memory in bytes where it has its own."""
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        return properties.name, int(properties.total_memory)
    return device, None


def use_threads(n_threads: int) -> None:
    """Compute with so many threads; 0: with as many as this process has processors for."""
    torch.set_num_threads(n_threads or min(torch.get_num_threads(), count_processors()))


def finish(device: torch.device) -> None:
    """Wait until a device has computed what was launched; only then is a measured time that of the computation."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


class OwnerReserve:
    """Memory that this process leaves to the machine's owner, in bytes, on each device."""

    n_bytes = 0


def free_memory_bytes(device: str) -> int:
    """Return how many bytes this process may still allocate on a device."""
    if device.startswith("cuda"):
        # torch keeps what was freed for its next allocation; the driver counts it as used.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = int(torch.cuda.mem_get_info(device)[0]) + unused
    else:
        free = measure_memory().free_bytes
    return max(0, free - OwnerReserve.n_bytes)
