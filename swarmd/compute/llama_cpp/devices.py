"""Where llama.cpp's library computes: the processor, or a card by the interfaces that the wheel brings.

A card is taken only when it is asked for: numbers of different cards differ, and those of none were measured yet.
"""

from __future__ import annotations

import ctypes as c
import re
from typing import NamedTuple

from swarmd.compute.hardware.device import OwnerReserve, free_memory_bytes
from swarmd.compute.llama_cpp.library import load_library
from swarmd.errors import ConfigError

PROCESSOR = "cpu"
CARDS = ("vulkan", "metal")  # as the library begins its names of devices: Vulkan0, Vulkan1, Metal


class Device(NamedTuple):
    """A device: its name in the library, what it is, and the library's handle of a card."""

    name: str
    description: str
    handle: int | None = None

    def count_free_bytes(self) -> int:
        """How much memory is free on it, without what is left to the machine's owner."""
        if self.handle is None:
            return free_memory_bytes(PROCESSOR)
        free, total = c.c_size_t(), c.c_size_t()
        load_library().ggml_backend_dev_memory(self.handle, c.byref(free), c.byref(total))
        return max(0, free.value - OwnerReserve.n_bytes)


def find_device(requested: str) -> Device:
    """Return the device of a setting: "" or "cpu", "vulkan", "vulkan:1", "metal". Raises ConfigError."""
    if requested in ("", PROCESSOR):
        return Device(PROCESSOR, PROCESSOR)
    cards = list_cards()
    kind, _, number = requested.partition(":")
    of_kind = [card for card in cards if re.sub(r"\d+$", "", card.name).lower() == kind]
    if kind in CARDS and int(number or 0) < len(of_kind):
        return of_kind[int(number or 0)]
    found = ", ".join(f"{card.name} ({card.description})" for card in cards) or "no card"
    raise ConfigError(
        f"GGUF is computed on the device cpu, vulkan or metal, as this machine has them, not on {requested!r}: "
        f"llama.cpp's library finds {found} here"
    )


def list_cards() -> list[Device]:
    """Return the devices beside the processor that the library can compute on."""
    library = load_library()
    handles = [library.ggml_backend_dev_get(number) for number in range(library.ggml_backend_dev_count())]
    named = [
        Device(
            library.ggml_backend_dev_name(handle).decode(errors="replace"),
            library.ggml_backend_dev_description(handle).decode(errors="replace"),
            handle,
        )
        for handle in handles
    ]
    return [device for device in named if device.name.lower().startswith(CARDS)]
