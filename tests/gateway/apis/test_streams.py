"""Work for whoever asked ends when he goes."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from swarmd.gateway.apis.refusals import ApiError, bad_request
from swarmd.gateway.apis.streams import run_while_connected


async def there() -> dict[str, Any]:
    await trio.sleep_forever()
    return {}


async def gone() -> dict[str, Any]:
    await trio.lowlevel.checkpoint()
    return {"type": "http.disconnect"}


async def test_what_is_made_ready_for_somebody_ends_when_he_goes() -> None:
    with trio.fail_after(20), pytest.raises(ApiError, match="has gone"):
        await run_while_connected(gone, trio.sleep_forever)


async def test_what_is_made_ready_is_done_and_a_refusal_comes_through() -> None:
    n_done = 0

    async def work() -> None:
        nonlocal n_done
        await trio.lowlevel.checkpoint()
        n_done += 1

    async def refuse() -> None:
        raise bad_request("no")

    await run_while_connected(there, work)
    assert n_done == 1
    with pytest.raises(ApiError, match="no"):
        await run_while_connected(there, refuse)
