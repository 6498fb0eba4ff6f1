"""Signs this peer's own records, each time with a higher number, so that a newer one always counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from swarmd.net.exchange import Exchange
from swarmd.protocol.membership import records
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.membership.records import AnyRecord, PeerRecord, RunRecord, SpanRecord

RECORD_TYPES: dict[str, type[AnyRecord]] = {"peer": PeerRecord, "span": SpanRecord, "run": RunRecord}


class RecordSigner:
    """See the module. Records end with this member's right to be here, at the latest."""

    def __init__(
        self,
        identity: Identity,
        certificate: tuple[bytes, ...],
        exchange: Exchange,
        wall_clock: Callable[[], float],
    ) -> None:
        self._identity = identity
        self._certificate = certificate
        self._exchange = exchange
        self._wall_clock = wall_clock
        self._sequence = 0

    def sign(self, descriptions: Iterable[dict[str, Any]]) -> list[bytes]:
        """Sign records by their fields without what all share; "kind" says which one it is."""
        now = int(self._wall_clock())
        self._sequence = max(self._sequence + 1, int(self._wall_clock() * 1000))
        common: dict[str, Any] = {
            "peer": self._identity.peer_id,
            "sequence": self._sequence,
            "issued_at": now,
            "expires_at": records.expiry_of(now, self._exchange.roster.pass_of(self._certificate).ends_at),
            "certificate": self._certificate,
        }
        signed = []
        for description in descriptions:
            fields = {name: value for name, value in description.items() if name != "kind"}
            record = RECORD_TYPES[description["kind"]](**common, **fields)
            signed.append(records.sign(record, self._identity))
        return signed
