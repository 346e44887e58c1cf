"""The results of several ranks as those of one worker: each has the heads of its own. No vLLM in here."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Fields = dict[str, Any]


def merged(parts: Sequence[Sequence[Mapping[str, Any]]]) -> list[Fields]:
    """Return the fields of layers from those of each rank, with the heads in the order of the request.

    ``places`` of a layer are the places of the rank's heads in that order.
    """
    return [_layer(layers) for layers in zip(*parts, strict=True)]


def _layer(parts: Sequence[Mapping[str, Any]]) -> Fields:
    numbers = {part["layer"] for part in parts}
    if len(numbers) != 1:
        raise ValueError(f"ranks tell of different layers: {sorted(numbers)}")
    told = [part for part in parts if part["places"]]
    order = np.argsort(np.concatenate([part["places"] for part in told]))
    fields = [{name: value for name, value in part.items() if name not in {"layer", "places"}} for part in told]
    return {"layer": numbers.pop()} | _joined(fields, order)


def _joined(fields: Sequence[Mapping[str, Any]], order: np.ndarray) -> Fields:
    """Join arrays by their first dimension, the heads. An output has none, and comes from one rank."""
    joined: Fields = {}
    for name, first in fields[0].items():
        if name == "output":
            joined[name] = first
            continue
        own = [part[name] for part in fields]
        joined[name] = _joined(own, order) if isinstance(first, Mapping) else np.concatenate(own)[order]
    return joined
