"""Who is let in: the right host, a key where one is needed. Before anything is read.

A page of somebody else's reaches loopback through the user's browser: by another origin (its POST of plain text needs
no consent, ours of JSON does, and none is given), or by a name that points here (rebinding: the Host is not ours).
"""

from __future__ import annotations

import hmac
import ipaddress
import time
from collections.abc import Callable

from starlette.requests import Request

from swarmd.gateway.apis.refusals import ApiError
from swarmd.gateway.keys import ApiKey, Keys

LOCAL_NAMES = ("localhost",)
OPEN_PATHS = ("/", "/health")
OPEN_FOLDER = "/page/files/"


class Guard:
    """The rules of one gateway. Without keys and on loopback everybody on this machine may ask."""

    def __init__(
        self,
        keys: Keys,
        hosts: tuple[str, ...],
        origins: tuple[str, ...],
        token: str,
        is_local: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.keys = keys
        self._clock = clock
        self._hosts = hosts
        self._origins = origins
        self._token = token
        self._is_local = is_local

    def admit(self, request: Request, needs_token: bool = False) -> str:
        """Let a request in, and say whose it is: a key's name, or "". Raises ApiError.

        ``needs_token``: only for the user of this machine, whose token no other user of it can read.
        """
        # The order matters. Host and origin first: a page of somebody else's in the user's browser must not even learn
        # whether a key is right. Then the open paths, which tell nothing that is secret. Then this machine's token,
        # which nobody else can read, and keys. Last, loopback without keys: a program that connects runs here.
        host = request.headers.get("host", "")
        if not self._is_our_host(host):
            raise ApiError(403, "permission_error", _explain_foreign_host(host))
        origin = request.headers.get("origin")
        if origin is not None and not self._is_our_origin(origin, request):
            raise ApiError(403, "permission_error", "pages of other origins are not let in (see [gateway] origins)")
        path = request.url.path
        if path in OPEN_PATHS or path.startswith(OPEN_FOLDER) or request.method == "OPTIONS":
            return ""
        presented_key = _read_key(request)
        if presented_key and hmac.compare_digest(presented_key.encode(), self._token.encode()):
            return ""
        key = self.keys.whose(presented_key) if presented_key and not needs_token else None
        if key is not None:
            self._require_current(key)
            return key.name
        if self._is_local and not self.keys.all() and not needs_token:
            return ""
        if needs_token:
            raise ApiError(401, "authentication_error", "only with this machine's own token", None, "invalid_token")
        reason = "an API key is needed: Authorization: Bearer sk-swarmd-..."
        if presented_key:
            reason = "this key is not known"
        raise ApiError(401, "authentication_error", reason, None, "invalid_api_key")

    def owner(self, name: str) -> str:
        """Say whose something is that outlasts a request: not that of a later key of the same name."""
        key = self.keys.named(name)
        return f"{name}@{key.sha256[:16]}" if key else ""

    def require_owner(self, owner: str) -> str:
        """Return the name of an owner's key. Raises ApiError for one that was taken back, or has ended, meanwhile."""
        name = owner.partition("@")[0]
        key = self.keys.named(name)
        if owner != self.owner(name):
            raise ApiError(401, "authentication_error", "this key was taken back", None, "invalid_api_key")
        if key is not None:
            self._require_current(key)
        return name

    def _require_current(self, key: ApiKey) -> None:
        if key.ends_at and key.ends_at <= self._clock():
            ended = time.strftime("%Y-%m-%d %H:%M", time.localtime(key.ends_at))
            raise ApiError(401, "authentication_error", f"this key ended on {ended}", None, "invalid_api_key")

    def models_of(self, name: str) -> tuple[str, ...]:
        """The models that a key is for, by the key's name; none is all."""
        key = self.keys.named(name)
        return key.models if key else ()

    def _is_our_host(self, host: str) -> bool:
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        name = name.strip("[]").lower()
        if name in LOCAL_NAMES or name in self._hosts:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not self._is_local

    def _is_our_origin(self, origin: str, request: Request) -> bool:
        return origin in self._origins or origin == f"{request.url.scheme}://{request.headers.get('host', '')}"


def _explain_foreign_host(host: str) -> str:
    """Say why a Host is refused, and which setting takes it."""
    name = host.rsplit(":", 1)[0][:64]
    return (
        f"this gateway is not called {name!r}: use the address that it prints, or write the name into config.toml, "
        "[gateway] hosts, and start it again"
    )


def _read_key(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
