"""Stored probes that watch a model: read from their files, and checked against the layers of the model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from attention_contract.errors import InternalError, InvalidRequest
from attention_contract.json_reading import from_json
from attention_contract.schemas.analyses.probes import (
    ProbeFacts,
    StateFeature,
    StatisticFeature,
    Watch,
    WatchStop,
)
from attention_contract.tensors import decode
from attention_contract.validation import validate
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.attention_pass import STATE_TAPS
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.models.passes.points import Point
from attention_service.modules.fitted_store import WEIGHTS
from attention_service.modules.store_files import open_tensors
from attention_transformers.model_layers import LayerKey


@dataclass(frozen=True, eq=False)
class WatchedProbe:
    """A probe at a state of a model."""

    id: str
    layer: LayerKey
    name: str
    """The point of the layer."""
    weights: Tensor
    """``[d]`` in float64, on the device of the model."""
    bias: float
    stop: WatchStop | None
    prompt: bool
    """True if the tokens of a prompt are scored too."""

    @property
    def point(self) -> Point:
        """The state that it scores."""
        return self.layer, self.name

    def scores(self, states: Tensor) -> Tensor:
        """The scores ``[…]`` of states ``[…, d]``, in float64. Raises InvalidRequest for states of another width."""
        check_width(self, states.shape[-1])
        return states.to(self.weights.device, torch.float64) @ self.weights + self.bias


@dataclass(frozen=True, eq=False)
class WatchedHeads:
    """A probe of statistics of heads, which scores generated tokens."""

    id: str
    of: StatisticFeature
    weights: NDArray[np.float64]
    """``[d]``: of each layer the statistics of its heads, one behind the other."""
    bias: float
    stop: WatchStop | None
    places: Sequence[AttentionPlace] = ()
    """The layers whose heads it reads, in their order."""
    prompt: bool = False

    def score(self, reports: Sequence[Mapping[str, Any]]) -> float:
        """The score of a token. ``reports``: of each layer, as ``PassWeights`` makes them."""
        rows = [report["statistics"][name] for report in reports for name in self.of.statistics]
        x = np.concatenate([row if isinstance(row, np.ndarray) else decode(row) for row in rows])
        return float(x.astype(np.float64) @ self.weights) + self.bias


Watched = WatchedProbe | WatchedHeads
"""A probe that watches generations."""


def check_width(probe: WatchedProbe, width: int) -> None:
    """Raise InvalidRequest for a probe of another width than that of the states."""
    if len(probe.weights) != width:
        raise InvalidRequest.at(
            "watch", f"the probe {probe.id} has {len(probe.weights)} weights, and the states are {width} wide",
            expected=width, actual=len(probe.weights),
        )  # fmt: skip


def watched_probes(
    loaded: LoadedModel, watches: Sequence[Watch], files: Mapping[str, str], param: str
) -> list[WatchedProbe]:
    """Read the probes of a request; ``files``: their paths by id. Raises InvalidRequest that names the field."""
    return [watched_state(loaded, watch, Path(files[watch.probe]), f"{param}.{at}") for at, watch in enumerate(watches)]


def _stored(path: Path, param: str) -> tuple[ProbeFacts, dict[str, Tensor]]:
    """The facts of a stored probe, and its weights by layer."""
    try:
        with open_tensors(path) as file:
            text = (file.metadata() or {})["probe"]
            facts = validate(ProbeFacts, from_json(text.encode(), "the metadata entry 'probe'"))
            names = [name for name in file.keys() if name.startswith(WEIGHTS)]  # noqa: SIM118  # it is no mapping
            return facts, {name.removeprefix(WEIGHTS): file.get_tensor(name) for name in names}
    except FileNotFoundError:
        raise InvalidRequest.at(f"{param}.probe", "it was deleted meanwhile") from None
    except (SafetensorError, OSError, KeyError) as fault:
        raise InternalError(f"the stored probe cannot be read: {fault}; delete it") from fault


def watched_heads(watch: Watch, path: Path, param: str) -> WatchedHeads | None:
    """Read a probe of statistics; None for one of a state. Raises InvalidRequest that names the field."""
    facts, stored = _stored(path, param)
    if not isinstance(facts.of, StatisticFeature):
        return None
    if watch.prompt:
        raise InvalidRequest.at(
            f"{param}.prompt", "the tokens of a prompt are scored by probes of states; leave prompt out"
        )
    (weights,), (layer,) = stored.values(), facts.layers
    return WatchedHeads(watch.probe, facts.of, weights.double().numpy(), layer.bias, watch.stop)


def watched_state(loaded: LoadedModel, watch: Watch, path: Path, param: str) -> WatchedProbe:
    """Read a probe of a state, and check it against the layers. Raises InvalidRequest that names the field."""
    facts, stored = _stored(path, param)
    layer, point = facts.layer, _point(facts)
    if point not in STATE_TAPS or layer is None:
        raise InvalidRequest.at(
            f"{param}.probe",
            f"it is a probe of {point}; tokens are watched at hidden, output, mlp and router, and generated ones by "
            "statistics of heads too",
        )
    weights = stored[str(layer)]
    known = {str(place.key): place for place in loaded.all_places}
    if (place := known.get(str(layer))) is None:
        raise InvalidRequest.at(f"{param}.probe", f"it is of layer {layer}, which this model has not")
    if (reason := loaded.runner.refuses((place.key, point), "read")) is not None:
        raise InvalidRequest.at(f"{param}.probe", f"layer {layer}: {reason}; take a probe of another layer or point")
    bias = next(facts_of_layer.bias for facts_of_layer in facts.layers if facts_of_layer.layer == layer)
    weights = weights.to(loaded.model.device, torch.float64)
    return WatchedProbe(watch.probe, place.key, point, weights, bias, watch.stop, watch.prompt)


def _point(facts: ProbeFacts) -> str:
    """Return the point that a probe reads; its weights along a steering vector are of the states after the layer."""
    if isinstance(facts.of, StatisticFeature):
        return "statistics of heads"
    return facts.of.point if isinstance(facts.of, StateFeature) else "hidden"
