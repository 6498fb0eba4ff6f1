"""Whatever fits the gateway's own description, and what does not: no request makes it fail (schemathesis).

``SWARMD_GATEWAY`` is its address. Every other request names a model that is there, and asks for little.
"""

from __future__ import annotations

import os
from typing import Any

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

URL = os.environ["SWARMD_GATEWAY"]
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
MOST = {**dict.fromkeys(LIMITS, 4), "n": 2, "best_of": 2}
N_EXAMPLES = int(os.environ.get("SWARMD_EXAMPLES", "10"))  # for each path
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]

schema = schemathesis.openapi.from_url(f"{URL}/openapi.json")


def within_reach(body: Any, number: int) -> Any:
    """The same request, of a model that is there, and with an answer that ends soon."""
    if not isinstance(body, dict):
        return body
    for name in ("n", "best_of"):
        if isinstance(body.get(name), int):
            body = {**body, name: min(body[name], MOST[name])}
    if not number % 2:
        return body
    for name in LIMITS:  # without one an answer goes on to the end of the context
        if isinstance(body.get(name), int | None):
            body = {**body, name: MOST[name]}
    options = body.get("options")
    if isinstance(options, dict | None):
        body = {**body, "options": {**(options or {}), "num_predict": MOST["max_tokens"]}}
    return {**body, "model": "smol"}


@schema.parametrize()
@settings(max_examples=N_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_no_request_makes_it_fail(case: Any) -> None:
    case.body = within_reach(case.body, len(repr(case.body)))
    case.call_and_validate(checks=CHECKS, timeout=60)
