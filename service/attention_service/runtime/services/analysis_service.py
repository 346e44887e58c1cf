"""Analyses beside the questions about one attention: retrieval, circuits, similarity and rollout."""

from attention_contract.errors import ModuleNotFound, VersionMismatch
from attention_contract.schemas.analyses.circuits import CircuitsReply, CircuitsRequest
from attention_contract.schemas.analyses.hopfield import HopfieldReply, HopfieldRequest
from attention_contract.schemas.analyses.rollout import RolloutReply, RolloutRequest
from attention_contract.schemas.analyses.similarity import SimilarityReply, SimilarityRequest
from attention_service.modules.library import Library
from attention_service.runtime.operations import circuits, hopfield, rollout, similarity
from attention_service.runtime.scheduling.request_runner import RequestRunner


class AnalysisService:
    """The analyses of one engine. Used from the event loop only."""

    def __init__(self, library: Library, runner: RequestRunner) -> None:
        self._library = library
        self._runner = runner
        self._device = runner.device
        self._run = runner.executor.run

    async def retrieve(self, request: HopfieldRequest, deadline: float | None = None) -> HopfieldReply:
        """Let states fall to stored patterns."""
        self._runner.check_ready()
        fields, ran = await self._run(hopfield.prepare(request, self._device), deadline)
        return HopfieldReply(**fields, ran=ran)

    async def circuits(self, name: str, request: CircuitsRequest, deadline: float | None = None) -> CircuitsReply:
        """The circuits of a module's heads, alone or composed with those of a later module."""
        self._runner.check_ready()
        module, later = self._library.get(name, request.version), None
        if request.with_ is not None:
            try:
                later = self._library.get(request.with_, request.with_version)
            except (ModuleNotFound, VersionMismatch) as fault:
                fault.param = "with" if isinstance(fault, ModuleNotFound) else "with_version"
                raise
        fields, ran = await self._run(circuits.prepare(module, later, request, self._device), deadline)
        return CircuitsReply(**fields, ran=ran)

    async def similarity(self, request: SimilarityRequest, deadline: float | None = None) -> SimilarityReply:
        """The similarity of every pair of heads whose weights or features are sent."""
        self._runner.check_ready()
        fields, ran = await self._run(similarity.prepare(request, self._device), deadline)
        return SimilarityReply(**fields, ran=ran)

    async def rollout(self, request: RolloutRequest, deadline: float | None = None) -> RolloutReply:
        """Rollout or flow of the weights that are sent."""
        self._runner.check_ready()
        fields, ran = await self._run(rollout.prepare(request, self._device), deadline)
        return RolloutReply(**fields, ran=ran)
