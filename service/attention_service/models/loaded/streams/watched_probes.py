"""Stored probes that watch a model: read from their files, and checked against the layers of the model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
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
from attention_contract.validation import validate
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.attention_pass import STATE_TAPS
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


def check_width(probe: WatchedProbe, width: int) -> None:
    """Raise InvalidRequest for a probe of another width than that of the states."""
    if len(probe.weights) != width:
        raise InvalidRequest.at(
            "watch", f"the probe {probe.id} has {len(probe.weights)} weights, and the states are {width} wide",
            expected=width, actual=len(probe.weights),
        )  # fmt: skip


def watched_probes(
    loaded: LoadedModel, watches: Sequence[Watch], files: Mapping[str, str], param: str, *, generates: bool = False
) -> list[WatchedProbe]:
    """Read the probes of a request; ``files``: their paths by id. Raises InvalidRequest that names the field."""
    probes = [_read(loaded, watch, Path(files[watch.probe]), f"{param}.{at}") for at, watch in enumerate(watches)]
    tokens = "target" if loaded.reader.pairs else "text"
    for at, probe in enumerate(probes if generates else ()):
        if loaded.place_of(probe.layer).queries != tokens:
            raise InvalidRequest.at(
                f"{param}.{at}.probe", f"layer {probe.layer} does not read the tokens that are generated"
            )
    return probes


def _read(loaded: LoadedModel, watch: Watch, path: Path, param: str) -> WatchedProbe:
    try:
        with open_tensors(path) as file:
            text = (file.metadata() or {})["probe"]
            facts = validate(ProbeFacts, from_json(text.encode(), "the metadata entry 'probe'"))
            layer, point = facts.layer, _point(facts)
            if point not in STATE_TAPS or layer is None:
                raise InvalidRequest.at(
                    f"{param}.probe", f"it is a probe of {point}; tokens are watched at hidden, output, mlp and router"
                )
            weights: Tensor = file.get_tensor(f"{WEIGHTS}{layer}")
    except FileNotFoundError:
        raise InvalidRequest.at(f"{param}.probe", "it was deleted meanwhile") from None
    except (SafetensorError, OSError, KeyError) as fault:
        raise InternalError(f"the stored probe cannot be read: {fault}; delete it") from fault
    known = {str(place.key): place for place in loaded.all_places}
    if (place := known.get(str(layer))) is None:
        raise InvalidRequest.at(f"{param}.probe", f"it is of layer {layer}, which this model has not")
    if (reason := loaded.runner.refuses((place.key, point), "read")) is not None:
        raise InvalidRequest.at(f"{param}.probe", f"layer {layer}: {reason}; take a probe of another layer or point")
    bias = next(each.bias for each in facts.layers if each.layer == layer)
    weights = weights.to(loaded.model.device, torch.float64)
    return WatchedProbe(watch.probe, place.key, point, weights, bias, watch.stop, watch.prompt)


def _point(facts: ProbeFacts) -> str:
    """Return the point that a probe reads; its weights along a steering vector are of the states after the layer."""
    if isinstance(facts.of, StatisticFeature):
        return "statistics of heads"
    return facts.of.point if isinstance(facts.of, StateFeature) else "hidden"
