"""What a verb that asks a model can know before it imports torch: the names, and whether anybody is there to ask.

The catalog on this disk is what the daemon knows while it runs. While it is down the catalog may be old: then a name
that it lacks is refused only where nobody could know better.
"""

from __future__ import annotations

import re
import socket
import sys
import threading
from collections.abc import Iterable

from swarmd_cli.context import is_running, membership

DIAL_S = 2.0  # for one of the swarm's members to take a connection, while this machine's daemon is down
MAX_DIALLED = 16  # that one of so many answers is enough to know
_TCP = re.compile(r"/(?:ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/(\d+)")


def require_answers(*models: str, adapter: str = "", draft: str = "") -> None:
    """Refuse names that the catalog lacks, and to wait where nobody answers.

    Raises NotJoined, ConfigError, DaemonNotRunning, SwarmUnavailable.
    """
    from swarmd.errors import DaemonNotRunning

    # Torch takes seconds to import: what can be told without it is told first. Who knows what:
    #
    #     daemon runs       its catalog is today's: a name that it lacks is none
    #     down, others up   the catalog here may be old: the members that are asked know better
    #     down, nobody up   the catalog here is all that there is, and the wait would be in vain
    member = membership()
    member.swarm()
    has_daemon = is_running()
    addresses: list[str] = []
    if not has_daemon:
        for peer_addresses in member.bootstrap().values():
            addresses += peer_addresses
    do_others_answer = bool(addresses) and _does_any_listen(addresses)
    if has_daemon:
        require_approved()
    if has_daemon or not do_others_answer:
        _require_names([name for name in models if name], adapter, draft)
    if has_daemon:
        return
    if not do_others_answer and not member.catalog().version:
        raise DaemonNotRunning(f"your daemon is down: swarmd up; as far as is known here {explain_waiting()}")
    if not do_others_answer:
        raise DaemonNotRunning("your daemon is down, and no other member of the swarm is known to answer: swarmd up")
    print("your daemon is down (swarmd up): asking other members of the swarm", file=sys.stderr, flush=True)


def explain_waiting() -> str:
    """Tell what a machine waits for whose join was not approved yet, as far as is known here; "" for any other."""
    member = membership()
    if member.catalog().version:  # which nobody is given before
        return ""
    return f"you wait for a founder, who lets this machine in with: swarmd members approve {member.identity().peer_id}"


def require_approved() -> None:
    """Raise SwarmUnavailable where a founder has not let this machine in yet."""
    from swarmd.errors import SwarmUnavailable

    if waiting := explain_waiting():
        raise SwarmUnavailable(waiting)


def _require_names(models: Iterable[str], adapter: str, draft: str) -> None:
    from swarmd.errors import ConfigError
    from swarmd.names import is_model_hash

    catalog = membership().catalog()
    if not catalog.version:
        return

    def require_listed(kind: str, name: str, listed: Iterable[str]) -> None:
        if name not in listed and not is_model_hash(name):
            known = ", ".join(sorted(listed)) or "none yet"
            raise ConfigError(f"the catalog has no {kind} {name!r}; it has: {known}")

    for name in models:
        require_listed("model", name, catalog.models)
    if adapter:
        require_listed("adapter", adapter, catalog.adapters)
    if draft:
        require_listed("draft", draft, {**catalog.models, **catalog.drafts})


def _does_any_listen(addresses: Iterable[str]) -> bool:
    """Does somebody take a TCP connection at one of these multiaddrs?"""
    # All are dialled at once, each by a thread of its own, and the first that answers is enough. The threads are
    # daemons: those that still wait for a timeout keep nobody from going on.
    matches = [_TCP.match(address) for address in addresses]
    endpoints = list(dict.fromkeys(match.groups() for match in matches if match))[:MAX_DIALLED]
    is_answered = threading.Event()
    n_left = threading.Semaphore(0)

    def dial(host: str, port: str) -> None:
        try:
            socket.create_connection((host, int(port)), timeout=DIAL_S).close()
            is_answered.set()
        except (OSError, ValueError, OverflowError):
            pass
        finally:
            n_left.release()

    for host, port in endpoints:
        threading.Thread(target=dial, args=(host, port), daemon=True).start()
    for _ in endpoints:
        n_left.acquire(timeout=DIAL_S)
        if is_answered.is_set():
            return True
    return False
