"""The services of what is fitted to whole models: lenses, probes and steering vectors."""

from attention_service.models.server.lens_service import LensService
from attention_service.models.server.model_service import ModelService
from attention_service.models.server.probe_service import ProbeService
from attention_service.models.server.vector_service import VectorService
from attention_service.modules.fitted_store import FittedStores
from attention_service.runtime.scheduling.request_runner import RequestRunner


class FitServices:
    """A service for each kind of fit. Used from the event loop only."""

    def __init__(self, stores: FittedStores, models: ModelService, runner: RequestRunner) -> None:
        self.lenses = LensService(stores.lenses, models, runner)
        self.probes = ProbeService(stores.probes, models, runner)
        self.vectors = VectorService(stores.vectors, models, runner)

    def __len__(self) -> int:
        """The number of fits on their way."""
        return len(self.lenses) + len(self.probes) + len(self.vectors)

    async def stop(self) -> None:
        """Stop every fit."""
        await self.lenses.stop()
        await self.probes.stop()
        await self.vectors.stop()
