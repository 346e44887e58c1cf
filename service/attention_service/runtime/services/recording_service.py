"""Recordings of texts: stored, read in parts, analysed."""

from functools import partial
from pathlib import Path

from attention_contract.schemas.analyses.recording_statistics import RecordingStatistics, RecordingStatisticsRequest
from attention_contract.schemas.analyses.rollout import RecordingRollout, RecordingRolloutRequest
from attention_contract.schemas.analyses.similarity import RecordingSimilarity, RecordingSimilarityRequest
from attention_contract.schemas.recordings import (
    RecordingFile,
    RecordingInfo,
    RecordingList,
    RecordingQuery,
)
from attention_service.modules.recording_store import RecordingStore
from attention_service.runtime.callers import caller
from attention_service.runtime.operations import recorded_statistics
from attention_service.runtime.operations.rollout import prepare_recorded as prepare_rollout
from attention_service.runtime.operations.similarity import prepare_recorded as prepare_similarity
from attention_service.runtime.scheduling.request_runner import RequestRunner


class RecordingService:
    """Answers requests about recordings. Used from the event loop only."""

    def __init__(self, store: RecordingStore, runner: RequestRunner) -> None:
        self._store = store
        self._runner = runner
        self._budget = runner.host

    async def add(self, recording: RecordingFile) -> RecordingInfo:
        """Store a recording durably. The same content is stored once."""
        self._runner.check_ready()
        check = partial(caller.get().check, "recordings_bytes")
        return await self._runner.in_thread(partial(self._store.add, recording, owner_of_recordings(), check))

    async def list(self) -> RecordingList:
        """Every stored recording of the caller."""
        return await self._runner.in_thread(partial(self._store.listing, owner_of_recordings()))

    async def get(self, recording: str, query: RecordingQuery) -> RecordingInfo:
        """The description of a recording, with the part of a tensor that the query names."""
        owner = owner_of_recordings()
        need = await self._runner.in_thread(partial(self._store.part_bytes, recording, query, owner))
        self._budget.check(need, "reading this part takes {need} bytes", "Read fewer heads, queries or keys at a time")
        return await self._runner.holding(need, partial(self._store.get, recording, query, owner))

    async def statistics(self, recording: str, request: RecordingStatisticsRequest) -> RecordingStatistics:
        """Statistics of the recorded weights, by layer and head."""
        owner = owner_of_recordings()
        info = await self._runner.in_thread(partial(self._store.get, recording, RecordingQuery(), owner))
        need = recorded_statistics.held_bytes(info, request)
        self._budget.check(need, "these statistics take {need} bytes", "Ask for layers with fewer keys")
        return await self._runner.holding(
            need, partial(recorded_statistics.statistics_of, self._store, recording, request, owner)
        )

    async def similarity(
        self, recording: str, request: RecordingSimilarityRequest, deadline: float | None = None
    ) -> RecordingSimilarity:
        """The similarity of every pair of recorded heads or layers."""
        self._runner.check_ready()
        prepare = partial(
            prepare_similarity, self._store, recording, request, owner_of_recordings(), self._runner.device
        )
        fields, ran = await self._runner.executor.run(await self._runner.in_thread(prepare), deadline)
        return RecordingSimilarity(**fields, ran=ran)

    async def rollout(
        self, recording: str, request: RecordingRolloutRequest, deadline: float | None = None
    ) -> RecordingRollout:
        """Rollout or flow of the recorded weights."""
        self._runner.check_ready()
        prepare = partial(prepare_rollout, self._store, recording, request, owner_of_recordings(), self._runner.device)
        fields, ran = await self._runner.executor.run(await self._runner.in_thread(prepare), deadline)
        return RecordingRollout(**fields, ran=ran)

    async def path(self, recording: str) -> Path:
        """The file of a recording."""
        return await self._runner.in_thread(partial(self._store.path, recording, owner_of_recordings()))

    async def delete(self, recording: str) -> None:
        """Remove a recording from the store."""
        self._runner.check_ready()
        await self._runner.in_thread(partial(self._store.delete, recording, owner_of_recordings()))


def owner_of_recordings() -> str | None:
    """The owner of the recordings that the caller may use; None for all of them."""
    asks = caller.get()
    return None if asks.manages else asks.name
