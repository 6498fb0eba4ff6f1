"""Every way a request can be refused, in OpenAI's form: status, type and code, so that its clients retry rightly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from swarmd.errors import CacheExhausted, Code, ConfigError, NoRoute, Refused, SwarmError
from swarmd.gateway.generation.quotas import QuotaUsedUp
from swarmd.gateway.generation.turns import QueueFull

WAIT_S = 5  # for a swarm that lacks something: servers come within an exchange of records, and load what is missing


@dataclass(eq=False)
class ApiError(Exception):
    """A refusal: HTTP status, OpenAI's type and code, which parameter is at fault, when to try again."""

    status: int
    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> dict[str, Any]:
        """The JSON that a client reads, in OpenAI's form."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def bad_request(
    message: str,
    param: str | None = None,
    code: str | None = None,
) -> ApiError:
    """Refuse a request that can never be right, for any client."""
    return ApiError(400, "invalid_request_error", message, param, code)


def unknown_model(name: str, names: list[str]) -> ApiError:
    """Refuse a name that is none of the swarm's, and list those."""
    listed = ", ".join(names) or "none yet"
    message = (
        f"the swarm has no model {name[:100]!r}; it has: {listed}. For a program that asks for a name of its own: "
        'config.toml, [gateway.names], "its name" = "a model", or "*" = "a model" for any'
    )
    return ApiError(404, "invalid_request_error", message, "model", "model_not_found")


# Agents shorten a conversation, and go on, if they know that it is too long: Codex by the code, pi, cn and opencode by
# the second sentence, as OpenAI has it, Claude Code by the first one, as Anthropic has it (docs/gateway.md, "Agents").
def too_long(n_prompt: int, limit: int) -> ApiError:
    """Refuse a prompt that leaves no room in the model's context; both are counts of tokens."""
    message = (
        f"prompt is too long: {n_prompt} tokens > {limit - 1} maximum. This model's maximum context length is {limit} "
        f"tokens, and an answer takes one at least: shorten the messages, or begin a new conversation"
    )
    return bad_request(message, "messages", "context_length_exceeded")


def queue_full(reason: Exception) -> ApiError:
    """Refuse a request for now, because too many wait."""
    message = f"too many requests: {reason}; try again in {WAIT_S} s"
    return ApiError(429, "rate_limit_error", message, None, "rate_limit_exceeded", WAIT_S)


def quota_used_up(reason: QuotaUsedUp) -> ApiError:
    """Refuse a request of a key that may have no more now."""
    return ApiError(429, "rate_limit_error", str(reason), None, reason.code, reason.retry_after_s)


def internal_error() -> ApiError:
    """Answer for a bug of ours, without telling what it is."""
    return ApiError(500, "server_error", "the gateway made a mistake, which is in its log")


@contextmanager
def as_api_errors(param: str | None = None) -> Iterator[None]:
    """Raise ApiError for what refuses a request in the gateway or the swarm; ``param`` is what cannot be right."""
    try:
        yield
    except QueueFull as error:
        raise queue_full(error) from None
    except QuotaUsedUp as error:
        raise quota_used_up(error) from None
    except SwarmError as error:
        raise from_swarm_error(error, param) from error


def from_swarm_error(error: SwarmError, param: str | None = None) -> ApiError:
    """Translate an error of the swarm's for the client; ``param`` is what of its request cannot be right."""
    if isinstance(error, CacheExhausted):
        return bad_request(str(error), "messages", "context_length_exceeded")
    if isinstance(error, ConfigError):
        return bad_request(str(error), param)
    code = "model_incomplete" if isinstance(error, NoRoute) else "swarm_unavailable"
    is_full = isinstance(error, Refused) and error.code is Code.NO_CAPACITY
    wait_s = error.retry_after_s if isinstance(error, Refused) and error.retry_after_s else WAIT_S
    if is_full:
        code = "no_capacity"
    retry_after_s = max(1, round(wait_s))
    return ApiError(503, "server_error", str(error), code=code, retry_after_s=retry_after_s)


def from_decoding_error(error: msgspec.ValidationError) -> ApiError:
    """Tell what is wrong with a body, and where: msgspec names the place as a path."""
    message, _, path = str(error).partition(" - at `$")
    param = path.removesuffix("`").lstrip(".") or None
    return bad_request(f"{param or 'the body'}: {message}", param)


def require_tokens(ids: Sequence[int], vocabulary: int, param: str) -> None:
    """Refuse tokens that a model does not have. Raises ApiError."""
    if not all(0 <= token < vocabulary for token in ids):
        raise bad_request(f"token ids are from 0 to {vocabulary - 1}", param)
