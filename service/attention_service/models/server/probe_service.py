"""Linear probes: their fits, which are questions to a model, text by text, and the store.

The features are held here, in memory that the budget of the host has admitted, and the probes of the layers are fitted
one after another in a thread beside the event loop.
"""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.probes import (
    FeaturesReply,
    FeaturesRequest,
    FitProbe,
    ProbeFacts,
    ProbeFeature,
    ProbeInfo,
    ProbeLayer,
    ProbeList,
    StateFeature,
    StatisticFeature,
    VectorFeature,
)
from attention_contract.schemas.models import ModelInfo
from attention_contract.tensor_files import from_pieces
from attention_service.core.inspection.linear_probes import LinearProbe, check_groups
from attention_service.models.server.fits_in_requests import AskedModelName
from attention_service.models.server.model_service import ModelService
from attention_service.models.server.probe_samples import LabelledSamples, ProbedFeature, units_of
from attention_service.models.server.running_fits import Fit, RunningFits, fit_id
from attention_service.modules.fitted_store import DIRECTIONS, WEIGHTS, FittedStore, arrays_by_layer, check_layer
from attention_service.runtime.callers import caller
from attention_service.runtime.scheduling.request_runner import RequestRunner
from attention_service.runtime.scheduling.reservation import Reservation
from attention_service.runtime.services.recording_service import owner_of_recordings

_PASSES: Final = 0.5
"""The share of a fit's progress that its passes are."""


class ProbeService(RunningFits[ProbeInfo]):
    """Fits, lists and removes probes. Used from the event loop only."""

    def __init__(self, store: FittedStore[ProbeInfo], models: ModelService, runner: RequestRunner) -> None:
        super().__init__(store, models, runner)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="attention-probes")

    async def create(self, model: str, request: FitProbe) -> ProbeInfo:
        """Fit a probe, or store a given one, and wait until it is there, but not longer than the request says."""
        self.runner.check_ready()
        info, owner = await self.models.get(model), owner_of_recordings()
        probe = _id(info.checkpoint, model, owner, request)
        if (stored := await self.stored(probe)) is not None:
            return stored
        feature = await self._feature(info, model, request.of)
        facts = ProbeFacts(model=model, created=datetime.now(UTC), of=request.of)
        if request.weights is not None:
            return await self._given(probe, facts, request, feature, owner)
        samples = LabelledSamples(request, feature)
        facts = facts.model_copy(
            update={
                "method": request.method,
                "texts": len(samples.texts),
                "false_positive_rate": request.false_positive_rate,
            }
        )
        begun = ProbeInfo(**facts.model_dump(), id=probe, state="fitting", progress=0.0)
        return await self.fitted(probe, begun, partial(self._fit, samples=samples), request.wait_s)

    async def list(self, model: str) -> ProbeList:
        """The caller's probes of one model, those that are being fitted first."""
        probes, size = await self.listing(model)
        return ProbeList(probes=probes, bytes=size, limit_bytes=self.store.limit)

    async def get(self, probe: str) -> ProbeInfo:
        """A probe of the caller with its weights. Raises ProbeNotFound."""
        return await self.with_arrays(probe, "weights", WEIGHTS)

    async def stop(self) -> None:
        """Stop every fit."""
        await super().stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ── fits ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _feature(self, info: ModelInfo, model: str, of: ProbeFeature) -> ProbedFeature:
        """Return what is asked of a model. Raises VectorNotFound, and InvalidRequest for a vector of another model."""
        if not isinstance(of, VectorFeature):
            return ProbedFeature(of)
        asked = AskedModelName({model}, info.checkpoint)
        path = Path(await self.models.fits.vector_file(of.vector, "of.vector", asked))
        directions = await self.runner.in_thread(partial(arrays_by_layer, path, DIRECTIONS))
        check_layer(directions, of.layer, "of.layer")
        return ProbedFeature(StateFeature(point="hidden", layer=of.layer), units_of(directions))

    async def _given(
        self, probe: str, facts: ProbeFacts, request: FitProbe, feature: ProbedFeature, owner: str | None
    ) -> ProbeInfo:
        """Store weights that were fitted elsewhere, if they have the width of their feature."""
        w = np.asarray(request.weights, np.float64)
        scale = None if request.scale is None else np.asarray(request.scale, np.float64)
        for name, x in (("weights", w), ("scale", scale)):
            if x is not None and x.ndim != 1:
                raise InvalidRequest.at(name, f"expected [d], one number for each of the feature; got {[*x.shape]}")
            if x is not None and not np.isfinite(x).all():
                raise InvalidRequest.at(name, "expected finite numbers")
        reply = await self.models.ask(facts.model, "features", FeaturesRequest(of=feature.asked))
        ((name, x),) = feature.read(from_pieces(reply.pieces, "reply", FeaturesReply).features).items()
        if x.shape[-1:] != w.shape:
            raise InvalidRequest.at(
                "weights", f"expected [{x.shape[-1]}], as wide as the feature of this model; got {[*w.shape]}",
                expected=[x.shape[-1]], actual=[*w.shape],
            )  # fmt: skip
        if scale is not None and (scale.shape != w.shape or not scale.all()):
            raise InvalidRequest.at("scale", f"expected {len(w)} numbers other than 0, one for each weight")
        layer = None if isinstance(request.of, StatisticFeature) else request.of.layer
        entry = ProbeLayer(layer=layer, bias=request.bias or 0.0)
        w = feature.weights(name, w if scale is None else w / scale)
        facts = facts.model_copy(update={"width": len(w), "layer": layer, "layers": [entry]})
        arrays = {f"{WEIGHTS}{name}": w}
        return await self.add(probe, facts, arrays, owner)

    async def _fit(self, fit: Fit[ProbeInfo], samples: LabelledSamples) -> ProbeInfo:
        """Read the features of every text, fit a probe to those of each layer, and store them."""
        request, held = samples.request, Reservation(self.runner.host, caller.get().name)
        try:
            for number, text in enumerate(samples.texts):
                question = FeaturesRequest(text=text, of=samples.feature.asked, positions=samples.positions(number))
                reply = samples.feature.read(await self._ask(fit.info.model, number, question))
                if not number:
                    need = samples.needed_bytes(reply)
                    self.runner.host.check(need, "the features take {need} bytes", "Send fewer texts or positions")
                    await held.take(need)
                samples.add(number, reply)
                fit.tell(_PASSES * (number + 1) / len(samples.texts))
            check_groups(samples.labels, samples.groups, request.folds)
            probes: dict[str, LinearProbe] = {}
            for name in samples.names:
                probes[name] = await self.runner.in_thread(partial(samples.fitted, name), self._threads)
                share = len(probes) / len(samples.names)
                fit.tell(_PASSES + (1 - _PASSES) * share)
            facts = fit.info.model_copy(update=samples.facts(probes))
            arrays = {f"{WEIGHTS}{name}": samples.feature.weights(name, own.weights) for name, own in probes.items()}
            return await self.add(fit.info.id, facts, arrays, fit.owner)
        finally:
            held.give_back()

    async def _ask(self, model: str, number: int, question: FeaturesRequest) -> dict[str, NDArray[Any]]:
        """The features of one text. A refusal names the positions of the text."""
        try:
            reply = await self.ask_text(model, "features", f"texts.{number}", question)
        except InvalidRequest as fault:
            if not (fault.param or "").startswith("positions"):
                raise
            raise InvalidRequest(fault.detail, param=f"positions.{number}", **fault.facts) from None
        return from_pieces(reply.pieces, "reply", FeaturesReply).features


def _id(checkpoint: str, model: str, owner: str | None, request: FitProbe) -> str:
    given = {"weights": request.weights, "scale": request.scale}
    arrays = {name: [] if x is None else [(x.shape, np.asarray(x, np.float64))] for name, x in given.items()}
    return fit_id((checkpoint, model, owner), request, arrays)
