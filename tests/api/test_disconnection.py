"""Work that is given up at the caller's deadline."""

import asyncio
import time

import pytest

from attention_contract.errors import DeadlineExceeded
from attention_service.api.disconnection import unless_gone


async def test_running_work_is_cancelled_at_the_deadline():
    ended = []

    async def work():
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(time.monotonic())

    async def receive():
        await asyncio.sleep(30)

    deadline = time.monotonic() + 0.05
    with pytest.raises(DeadlineExceeded):
        await unless_gone(receive, work(), deadline)
    assert deadline <= ended[0] < deadline + 5
