"""Checkpoints on their way from the hub. Those who ask for the same one share its fetch, and any of them may leave."""

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Final

from attention_contract.errors import AttentionError, CheckpointNotFound, Conflict, Draining, InternalError, Overloaded
from attention_contract.schemas.checkpoints import CheckpointReply, FetchCheckpoint, FetchProgress
from attention_service.modules.checkpoints import hub
from attention_service.modules.store_files import reason

log = logging.getLogger(__name__)
MOST: Final = 4
"""Fetches at a time."""


@dataclass(frozen=True)
class _Fetch:
    """One checkpoint on its way."""

    repository: str
    revision: str | None
    """The one that was asked for."""
    progress: hub.Progress
    ended: "asyncio.Future[None]"

    def reply(self) -> CheckpointReply:
        """Describe the checkpoint as long as nothing of it can be read."""
        state = self.progress
        progress = FetchProgress(
            revision=state.revision,
            bytes=state.bytes,
            total_bytes=state.total_bytes,
            files=state.files,
            total_files=state.total_files,
        )
        problem = "it is being fetched from the hub"
        return CheckpointReply(path=self.repository, bytes=state.total_bytes or 0, problem=problem, fetch=progress)


class CheckpointFetches:
    """The fetches of one server. Used from the event loop only.

    Each is a thread that the end of the process does not wait for.
    """

    def __init__(self, root: Path, limit: int) -> None:
        """``limit``: the bytes of the largest checkpoint."""
        self._root = root
        self._limit = limit
        self._fetches: dict[str, _Fetch] = {}
        self._claims = hub.DiskClaims()

    def under_way(self) -> list[CheckpointReply]:
        """Describe every checkpoint that is being fetched."""
        return [fetch.reply() for fetch in self._fetches.values()]

    def find(self, path: str) -> CheckpointReply | None:
        """Describe a checkpoint that is being fetched; None for any other."""
        return self._fetches[path].reply() if path in self._fetches else None

    async def fetch(self, request: FetchCheckpoint) -> CheckpointReply | None:
        """Fetch a checkpoint, and wait until it is there, but not longer than the request says; then describe it.

        The fetch goes on if the caller leaves. Raises Conflict if another revision is being fetched or if the fetch is
        cancelled, Overloaded, and what ``hub.fetch`` does.
        """
        fetch = self._fetches.get(request.repository) or self._start(request)
        if request.revision not in {None, fetch.revision}:
            raise Conflict.at(
                "revision",
                f"{request.repository} is being fetched at revision {fetch.revision or 'main'}; wait for it, "
                "or cancel it",
            )
        await asyncio.wait({fetch.ended}, timeout=request.wait_s)
        if not fetch.ended.done():
            return fetch.reply()
        fetch.ended.result()
        return None

    def cancel(self, path: str) -> None:
        """Stop a fetch, and fail those who wait for it. Raises CheckpointNotFound if there is none."""
        fetch = self._fetches.get(path)
        if fetch is None:
            raise CheckpointNotFound(f"no checkpoint {path[:128]!r} is being fetched", param="path")
        self._stop(fetch, Conflict(f"the fetch of {path} was cancelled", param="repository"))

    def stop(self) -> None:
        """Stop every fetch."""
        for fetch in list(self._fetches.values()):
            self._stop(fetch, Draining(f"the server stopped before it had fetched {fetch.repository}"))

    def _start(self, request: FetchCheckpoint) -> _Fetch:
        if len(self._fetches) >= MOST:
            raise Overloaded(f"{MOST} checkpoints are being fetched already; try again later", limit=MOST)
        loop = asyncio.get_running_loop()
        fetch = _Fetch(request.repository, request.revision, hub.Progress(), loop.create_future())

        def work() -> None:
            fault: AttentionError | None = None
            try:
                hub.fetch(self._root, fetch.repository, fetch.revision, self._limit, fetch.progress, self._claims)
            except hub.FetchStoppedError:
                return
            except AttentionError as raised:
                fault = raised
            except Exception as raised:
                log.exception("a checkpoint could not be fetched")
                fault = InternalError(f"{fetch.repository} could not be fetched: {reason(raised)}")
            with suppress(RuntimeError):  # the server has stopped
                loop.call_soon_threadsafe(self._end, fetch, fault)

        self._fetches[fetch.repository] = fetch
        Thread(target=work, name="attention-hub", daemon=True).start()
        return fetch

    def _stop(self, fetch: _Fetch, fault: AttentionError) -> None:
        fetch.progress.stopped = True
        self._end(fetch, fault)

    def _end(self, fetch: _Fetch, fault: AttentionError | None) -> None:
        """Tell those who wait. Of a fetch that was stopped its thread tells nothing more."""
        if fetch.ended.done():
            return
        del self._fetches[fetch.repository]
        if fault is None:
            fetch.ended.set_result(None)
            return
        fetch.ended.set_exception(fault)
        fetch.ended.exception()  # seen, also if nobody waits
