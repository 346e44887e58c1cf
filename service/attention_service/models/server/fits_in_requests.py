"""The stored fits that a request names: probes that watch, and steering vectors that edits add."""

from collections.abc import Collection, Iterator
from functools import partial
from typing import NamedTuple

from attention_contract.base import WireModel
from attention_contract.errors import InvalidRequest, NotFound
from attention_contract.schemas.analyses.probes import ProbeInfo, VectorFeature
from attention_contract.schemas.analyses.vectors import VectorInfo
from attention_contract.schemas.attention import AddedVector, Edit
from attention_contract.schemas.costs.model_complexity import PricedProbe
from attention_contract.schemas.openai import AttentionOfTokens
from attention_service.modules.fitted_store import FittedStore, InfoT
from attention_service.runtime.scheduling.request_runner import RequestRunner
from attention_service.runtime.services.recording_service import owner_of_recordings

Files = dict[str, str]
"""Paths of files by id."""


class AskedModelName(NamedTuple):
    """The model that a request asks."""

    names: Collection[str]
    """Its names: with an adapter, and without."""
    checkpoint: str
    """The path of its checkpoint."""


class FitsInRequests:
    """Finds the files of the caller's probes and vectors. Used from the event loop only."""

    def __init__(self, runner: RequestRunner, probes: FittedStore[ProbeInfo], vectors: FittedStore[VectorInfo]) -> None:
        self._runner, self._probes, self._vectors = runner, probes, vectors

    async def probe_files(self, request: WireModel, model: AskedModelName) -> Files:
        """The files of the probes that watch. Raises ProbeNotFound, and InvalidRequest for one of another model."""
        beside = getattr(request, "attention", None)
        param, watches = "watch", getattr(request, "watch", ())
        if isinstance(beside, AttentionOfTokens):
            param, watches = "attention.watch", beside.watch
        files: Files = {}
        for at, watch in enumerate(watches):
            field = f"{param}.{at}.probe"
            if watch.probe in files:
                raise InvalidRequest.at(field, "the probe watches twice; leave one of them out")
            info, files[watch.probe] = await self._found(self._probes, watch.probe, field)
            if info.model not in model.names:
                raise InvalidRequest.at(field, f"it is a probe of the model {info.model}; fit one to this model")
        return files

    async def vector_files(self, request: WireModel, model: AskedModelName) -> Files:
        """The files of the vectors that edits add. Raises VectorNotFound, and InvalidRequest for another model's."""
        files: Files = {}
        for field, vector in vectors_in(request):
            if vector not in files:
                files[vector] = await self.vector_file(vector, field, model)
        return files

    async def vector_file(self, vector: str, field: str, model: AskedModelName) -> str:
        """The file of a vector. Raises VectorNotFound, and InvalidRequest for one of another model, for a field."""
        info, file = await self._found(self._vectors, vector, field)
        if info.model not in model.names or info.checkpoint != model.checkpoint:
            raise InvalidRequest.at(
                field, f"it is a vector of the model {info.model} ({info.checkpoint}); fit one to this model"
            )
        return file

    async def _found(self, store: FittedStore[InfoT], fitted: str, field: str) -> tuple[InfoT, str]:
        """Describe a stored fit of the caller, with its file. Raises the error of its kind, for a field."""
        owner = owner_of_recordings()
        try:
            info = await self._runner.in_thread(partial(store.get, fitted, owner))
            return info, str(await self._runner.in_thread(partial(store.path, fitted, owner)))
        except NotFound as fault:
            raise store.kind.missing(fault.detail, param=field) from None


def vectors_in(request: WireModel) -> Iterator[tuple[str, str]]:
    """Yield the vectors that a request names, each with its field."""
    beside = getattr(request, "attention", None)
    edits, param = getattr(request, "edits", {}), "edits"
    if isinstance(beside, AttentionOfTokens):
        edits, param = beside.edits, "attention.edits"
        for at, steering in enumerate(beside.steer):
            yield f"attention.steer.{at}.{'id' if steering.vector is None else 'vector'}", steering.named
    for layer, stated in edits.items():
        for at, edit in enumerate(stated):
            if isinstance(edit.add, AddedVector):
                yield f"{param}.{layer}.{at}.add.vector", edit.add.vector
    probe = getattr(request, "probe", None)
    if isinstance(probe, PricedProbe) and isinstance(probe.of, VectorFeature):
        yield "probe.of.vector", probe.of.vector
    sweep = getattr(request, "sweep", None)
    if isinstance(sweep, Edit) and isinstance(sweep.add, AddedVector):
        yield "sweep.add.vector", sweep.add.vector
