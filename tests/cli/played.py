"""A gateway that says what a test has it say, without a process."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import msgspec
from swarmd_cli.gateway_client import GatewayClient, ModelEntry, ModelPresence, StreamEvent


class PlayedGateway(GatewayClient):
    """Knows whole models by name, and which of them can chat; says some events, and an error where there is one."""

    def __init__(self, chats: dict[str, bool | None], *events: Any) -> None:
        super().__init__("http://nowhere", "")
        object.__setattr__(self, "played", (chats, events))

    def models(self) -> list[ModelEntry]:
        chats, _ = self.played  # type: ignore[attr-defined]
        return [ModelEntry(name, ModelPresence((), can)) for name, can in chats.items()]

    def stream(self, path: str, body: dict[str, Any]) -> Generator[StreamEvent]:
        _, events = self.played  # type: ignore[attr-defined]
        for event in events:
            if isinstance(event, Exception):
                raise event
            yield msgspec.convert(event, StreamEvent)
