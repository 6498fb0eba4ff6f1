"""Every way swarmd can fail, each with the exit code of the command line and, where it crosses the wire, a code.

Who is at fault is the type: ``ConfigError`` is the user's to fix, ``PeerError`` another machine's (try another),
``SwarmUnavailable`` nobody's (back off), ``IntegrityError`` a liar's (discard and penalise).
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from swarmd.printable import clean_text

if TYPE_CHECKING:
    from swarmd.values import Span


class Code(StrEnum):
    """Why a peer refused, as sent on the wire. Unknown codes read as ``REFUSED``."""

    REFUSED = "refused"
    UNSUPPORTED = "unsupported"
    MALFORMED = "malformed"
    NOT_A_MEMBER = "not_a_member"
    REVOKED = "revoked"
    WAITS = "waits"
    NOT_ALLOWED = "not_allowed"
    NO_SESSION = "no_session"
    SESSION_LOST = "session_lost"
    OP_GAP = "op_gap"
    STALE_EPOCH = "stale_epoch"
    STRANGER = "stranger"
    BAD_SHAPE = "bad_shape"
    NOT_FINITE = "not_finite"
    TOO_LONG = "too_long"
    NO_CAPACITY = "no_capacity"
    NOT_SERVING = "not_serving"
    NUMERICS_DIFFER = "numerics_differ"
    NOT_HELD = "not_held"
    NOT_HERE = "not_here"
    BANNED = "banned"

    @classmethod
    def _missing_(cls, value: object) -> Code:
        return cls.REFUSED


OUR_MEMBERSHIP = (Code.NOT_A_MEMBER, Code.REVOKED, Code.WAITS, Code.NOT_ALLOWED)  # every member will say the same


#     SwarmError
#     |-- ConfigError, DaemonNotRunning, NotJoined, CacheExhausted   the user changes something
#     |-- PeerError: try another peer
#     |   |-- Unreachable, PeerTimeout                               its connection, or its silence
#     |   |-- Refused                                                it answered no, with a code
#     |   '-- RemoteProtocolError                                    it sent what no honest peer sends
#     |       '-- Forged, OutOfStep, OtherVersion
#     |-- SwarmUnavailable: back off
#     |   '-- NoRoute
#     '-- IntegrityError: discard, and penalise
#         '-- WrongAnswer
class SwarmError(Exception):
    """The root of the tree. Its text may quote a peer or a file, and whoever catches it prints it: so it is clean."""

    exit_code = 1

    def __str__(self) -> str:
        return clean_text(super().__str__())


class ConfigError(SwarmError):
    """The user can fix this: an option, a file, an invite."""

    exit_code = 2


class DaemonNotRunning(SwarmError):
    """No daemon answers for this home."""

    exit_code = 3


class NotJoined(SwarmError):
    """This home is no member of a swarm."""

    exit_code = 4


class PeerError(SwarmError):
    """Another peer failed; trying a different one may work."""


class Unreachable(PeerError):
    """No connection to the peer could be made, or the one there was has ended."""


class PeerTimeout(PeerError):
    """The peer did not answer, or made no progress, before a deadline."""


class Refused(PeerError):
    """The peer answered no, with a code and sometimes how long to wait, or what its clock says (unix seconds)."""

    def __init__(self, code: Code, message: str, retry_after_s: float | None = None, peer_time: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s
        self.peer_time = peer_time


class RemoteProtocolError(PeerError):
    """The peer sent bytes that no honest peer sends."""


class Forged(RemoteProtocolError):
    """The peer sent what somebody else is said to have signed, and did not."""


class OutOfStep(RemoteProtocolError):
    """What the peer sent fits another state than is here: its channel ends, and nothing is held against it."""


class OtherVersion(RemoteProtocolError):
    """The peer speaks a version of the protocol that this one does not: nobody's fault."""


class SwarmUnavailable(SwarmError):
    """The swarm cannot do this now; back off and say what is missing."""

    exit_code = 75


class NoRoute(SwarmUnavailable):
    """No live server holds some blocks of the model."""

    exit_code = 5

    def __init__(self, message: str, missing: tuple[Span, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class IntegrityError(SwarmError):
    """Bytes, a signature or a certificate that do not verify."""


class WrongAnswer(IntegrityError):
    """Two chains of servers give something else for the same tokens, from token ``first_token`` of a session on."""

    def __init__(self, message: str, first_token: int) -> None:
        super().__init__(message)
        self.first_token = first_token


class CacheExhausted(SwarmError):
    """A prompt or session that does not fit the model's limit or the free cache."""

    exit_code = 2


def all_errors(error: BaseException) -> list[BaseException]:
    """The errors inside nested groups, in order."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in all_errors(inner)]
    return [error]


def first_error(error: BaseException) -> BaseException:
    """The first error inside nested groups."""
    return all_errors(error)[0]
