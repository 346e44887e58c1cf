"""Uvicorn that sleeps while nobody asks."""

import asyncio
from contextlib import suppress

import uvicorn

from attention_service.runtime.ticks import to_tick


class TickingServer(uvicorn.Server):
    """Uvicorn that renews the date of replies at each tick. Uvicorn itself wakes ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        self._stopping: asyncio.Future[None] | None = None
        super().__init__(config)

    @property
    def should_exit(self) -> bool:
        """True once the server is to stop. It may be set from any thread."""
        return self._should_exit

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        self._should_exit = value
        if value and self._stopping is not None:
            with suppress(RuntimeError):  # the loop was closed
                self._stopping.get_loop().call_soon_threadsafe(self._stop)

    async def main_loop(self) -> None:
        """Renew the date of replies until the server is to stop."""
        self._stopping = asyncio.get_running_loop().create_future()
        while not await self.on_tick(0):
            await asyncio.wait([self._stopping], timeout=to_tick())

    def _stop(self) -> None:
        if self._stopping is not None and not self._stopping.done():
            self._stopping.set_result(None)
