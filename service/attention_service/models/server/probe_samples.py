"""The labelled features of a probe that is being fitted, and what a model is asked for to read them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.probes import (
    MAX_SAMPLES,
    FitProbe,
    ProbeLayer,
    StateFeature,
    StatisticFeature,
)
from attention_contract.schemas.models import layer_of
from attention_service.core.inspection.linear_probes import LinearProbe, fit_probe
from attention_service.models.fit_memory import probe_bytes

_SPECIAL: Final = 16
"""Tokens that a tokenizer puts around a text, at most."""


@dataclass(frozen=True)
class ProbedFeature:
    """The feature of a probe: the question to a model, and the directions along which its states are read."""

    asked: StateFeature | StatisticFeature
    units: Mapping[str, NDArray[np.float64]] | None = None
    """The directions ``[d]`` of a steering vector, of length 1, by layer."""

    def read(self, features: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return the features ``[samples, d]`` of some tokens, ``[samples, 1]`` along a vector."""
        if self.units is None:
            return dict(features)
        return {name: x @ self.units[name][:, None] for name, x in features.items() if name in self.units}

    def weights(self, name: str, own: NDArray[Any]) -> NDArray[Any]:
        """Return the weights of a layer's states, by those of its feature."""
        return own if self.units is None else own[0] * self.units[name]


def units_of(directions: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[np.float64]]:
    """The directions of length 1. Raises InvalidRequest for a vector that is 0 in a layer."""
    units: dict[str, NDArray[np.float64]] = {}
    for name, x in directions.items():
        if not (norm := float(np.linalg.norm(v := np.asarray(x, np.float64)))):
            raise InvalidRequest.at("of.vector", f"its direction of layer {name} is 0; take other layers")
        units[name] = v / norm
    return units


class LabelledSamples:
    """The labelled tokens of a fit, as they come text by text."""

    def __init__(self, request: FitProbe, feature: ProbedFeature) -> None:
        self.request = request
        self.feature = feature
        self.texts = request.texts or []
        self._given: Sequence[int | list[int]] = request.labels or []
        self._features: dict[str, NDArray[np.float32]] = {}
        self._labels: list[int] = []
        self._groups: list[int] = []
        self.most = sum(map(self._rows, range(len(self.texts))))
        """The samples, or a bound of them if the texts are not divided into tokens yet."""

    def _rows(self, number: int) -> int:
        own: Any = self._given[number]
        positions = self.request.positions
        if isinstance(own, list):
            return len(own)  # one for each sample
        if isinstance(positions, list):
            chosen: int | list[int] = positions[number]
            return len(chosen) if isinstance(chosen, list) else 1
        if positions == "all":
            return len(self.texts[number].encode()) + _SPECIAL
        return 1

    def positions(self, number: int) -> Any:
        """The positions of one text, as a question has them."""
        given: Any = self.request.positions
        if not isinstance(given, list):
            return given
        chosen = given[number]
        return chosen if isinstance(chosen, list) else [chosen]

    def needed_bytes(self, first: dict[str, NDArray[Any]]) -> int:
        """The memory of all features and of a fit, by those of the first text."""
        return probe_bytes(len(self.texts), self.most, [x.shape[-1] for x in first.values()])

    def add(self, number: int, features: dict[str, NDArray[Any]]) -> None:
        """Take the features of one text. Raises InvalidRequest for other labels than tokens, and for too many."""
        own, rows = self._given[number], len(next(iter(features.values())))
        labels, first = own if isinstance(own, list) else [own] * rows, len(self._labels)
        if len(labels) != rows:
            raise InvalidRequest.at(
                f"labels.{number}", f"expected one for each of {rows} tokens of the text; got {len(labels)}",
                expected=rows, actual=len(labels),
            )  # fmt: skip
        if first + rows > min(self.most, MAX_SAMPLES):
            raise InvalidRequest.at("positions", f"expected at most {min(self.most, MAX_SAMPLES)} samples")
        for name, x in features.items():
            if not np.isfinite(x).all():
                raise InvalidRequest.at(
                    f"texts.{number}", "the numbers of the model are not finite; leave the text out"
                )
            if name not in self._features:
                self._features[name] = np.empty((min(self.most, MAX_SAMPLES), x.shape[-1]), np.float32)
            self._features[name][first : first + rows] = x
        self._labels += labels
        self._groups += [number] * rows

    @property
    def names(self) -> Sequence[str]:
        """The layers that have features."""
        return [*self._features]

    @property
    def labels(self) -> NDArray[np.int64]:
        """The labels ``[samples]``."""
        return np.array(self._labels)

    @property
    def groups(self) -> NDArray[np.int64]:
        """The text of each of ``[samples]``."""
        return np.array(self._groups)

    def fitted(self, name: str) -> LinearProbe:
        """Fit the probe of one layer."""
        request = self.request
        return fit_probe(
            self._features[name][: len(self._labels)], self.labels, self.groups, method=request.method,
            regularization=request.regularization, folds=request.folds,
            false_positive_rate=request.false_positive_rate,
        )  # fmt: skip

    def facts(self, probes: Mapping[str, LinearProbe]) -> dict[str, Any]:
        """The facts of the fitted probes by layer."""
        layers = [
            ProbeLayer(
                layer=self._layer(name), bias=probe.bias, auc=probe.auc, auc_low=probe.auc_low,
                auc_high=probe.auc_high, threshold=probe.threshold,
            )
            for name, probe in probes.items()
        ]  # fmt: skip
        best = max(probes, key=lambda name: probes[name].auc)
        width = len(self.feature.weights(best, probes[best].weights))
        return {
            "samples": len(self._labels), "positives": sum(self._labels), "width": width,
            "layer": self._layer(best), "layers": layers,
        }  # fmt: skip

    def _layer(self, name: str) -> int | str | None:
        if isinstance(self.request.of, StatisticFeature):
            return None
        return layer_of(name)
