"""The adapters that a server's sessions ask for: fetched like weights, handed to the worker, ready or refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import msgspec
import trio

from swarmd.errors import Code, IntegrityError, Refused, SwarmError, SwarmUnavailable
from swarmd.net.api import TaskStatus
from swarmd.net.tasks import Tasks
from swarmd.node.worker.worker_link import WorkerLink, WorkerLost
from swarmd.protocol.models import adapter as adapters
from swarmd.protocol.wire.worker import AdapterLoaded, LoadAdapter
from swarmd.values import ModelId
from swarmd.weights.supply import Supply

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 0.5  # a small adapter is there by then
UNLISTED_RETRY_S = 5.0  # a catalog that is newer crosses the swarm in that
FAILED_FOR_S = 10.0  # a fetch that failed is not begun again for each session that asks
MAX_REMEMBERED = 64  # adapters that come or have failed: names only, bounded because strangers give them
MAX_BYTES = 1 << 30  # of one adapter: three times rank 64 on every matrix of an 8 B model
MAX_FETCHES = 2  # at a time: sessions share the link with them


# A session that names an adapter is refused until it is here, and its client asks again:
#
#     require --> listed, and made for this base? --no--> refused for good
#             --> ready? --yes--> the session opens
#             --> failed a moment ago? --yes--> refused, until FAILED_FOR_S is over
#             --> else: a task fetches and loads it; refused with RETRY_AFTER_S meanwhile
#
# So no session's opening waits for a download. A client may name any adapter of the catalog, and have it fetched: what
# is under way is bounded in number, in bytes and at a time, and a failure is not repeated for each session.
class ServerAdapters:
    """The adapters of one server. ``listed`` gives those of the catalog: hash to the hash of what each is made for."""

    def __init__(
        self, supply: Supply, base: ModelId, worker: WorkerLink, listed: Callable[[], Mapping[str, str]]
    ) -> None:
        self._supply = supply
        self._base = base
        self._worker = worker
        self._listed = listed
        self._tasks = Tasks()
        self._ready: set[str] = set()
        self._failed: dict[str, tuple[Code, str, float]] = {}
        self._coming: set[str] = set()
        self._fetches = trio.CapacityLimiter(MAX_FETCHES)

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own what is under way until cancelled."""
        async with self._tasks.open():
            task_status.started()
            await trio.sleep_forever()

    def require(self, adapter: str) -> None:
        """Refuse a session until its adapter is ready; begins to get it. Raises Refused."""
        if adapter in self._ready:
            return
        base = self._listed().get(adapter)
        if base is None:
            raise Refused(Code.NOT_HELD, f"no catalog known here lists the adapter {adapter[:12]}", UNLISTED_RETRY_S)
        if base != self._base:
            raise Refused(Code.UNSUPPORTED, f"{adapter[:12]} is made for {base[:12]}, not for {self._base[:12]}")
        code, reason, until = self._failed.get(adapter, (Code.REFUSED, "", 0.0))
        if trio.current_time() < until:
            raise Refused(code, reason, until - trio.current_time())
        if len(self._coming) >= MAX_REMEMBERED:
            raise Refused(Code.NO_CAPACITY, "too many adapters are on their way to this server", RETRY_AFTER_S)
        if adapter not in self._coming:
            self._coming.add(adapter)
            self._tasks.start_soon(self._get, adapter)
        raise Refused(Code.NOT_HELD, f"the adapter {adapter[:12]} is on its way to this server", RETRY_AFTER_S)

    def forget(self) -> None:
        """The worker was replaced: it has none."""
        self._ready.clear()
        self._coming.clear()

    async def _get(self, adapter: str) -> None:
        code = Code.UNSUPPORTED  # what is wrong with an adapter stays wrong
        try:
            async with self._fetches:
                manifest = await self._supply.manifest(ModelId(adapter))
                base = adapters.base_of(manifest)
                if base != self._base:
                    raise IntegrityError(f"{adapter[:12]} is made for {base[:12]}, not for {self._base[:12]}")
                n_bytes = sum(entry.n_bytes for entry in manifest.entries)
                if n_bytes > MAX_BYTES:
                    raise IntegrityError(f"an adapter of {n_bytes} B; at most {MAX_BYTES} are loaded")
                folder = await self._supply.ensure(ModelId(adapter))
            config = msgspec.json.encode(adapters.lora_of(folder.manifest))
            shards = tuple(str(path) for path in folder.shards())
            loaded = await self._worker.call(LoadAdapter(adapter=adapter, shards=shards), config)
            failure = loaded.failure if isinstance(loaded, AdapterLoaded) else "the worker did not say"
            if failure:
                self._supply.discard(ModelId(adapter))
        except WorkerLost:
            self._coming.discard(adapter)
            return  # the next worker is asked anew
        except SwarmUnavailable as error:
            code = Code.NOT_HELD
            failure = str(error)
        except SwarmError as error:
            failure = str(error)
        self._coming.discard(adapter)
        if failure:
            self._fail(adapter, code, failure)
        else:
            self._ready.add(adapter)

    def _fail(self, adapter: str, code: Code, reason: str) -> None:
        logger.warning("no adapter %s: %s", adapter[:12], reason)
        if len(self._failed) >= MAX_REMEMBERED:
            del self._failed[next(iter(self._failed))]
        self._failed[adapter] = (code, reason[:500], trio.current_time() + FAILED_FOR_S)
