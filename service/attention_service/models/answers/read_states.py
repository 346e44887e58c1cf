"""The states around the layers of a request, as a run reads them for replies, recordings and probes."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from attention_contract.base import valid
from attention_contract.schemas.analyses.probes import ProbeScores
from attention_service.core.tensors import to_numpy
from attention_service.models.loaded.checked_request import CheckedRequest
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_runner import ON_HOST, WHOLE, Reading
from attention_service.models.passes.attention_places import AttentionPlace, stack_of
from attention_service.models.passes.points import Point


def states_to_read(
    loaded: LoadedModel, checked: CheckedRequest, added: Iterable[str] = (), *, hidden: bool = False
) -> dict[Point, Reading]:
    """The states that a request reads: what its layers add, hidden ones with the first of a stack, those of probes.

    ``added``: the names of the points of each layer, besides ``hidden``.
    """
    read: list[Point] = [(place.key, name) for name in added for place in checked.places]
    if hidden:
        firsts: dict[str, AttentionPlace] = {}
        for place in loaded.all_places:
            firsts.setdefault(stack_of(place.key), place)
        read += [(place.key, "hidden") for place in checked.places]
        read += [(place.key, "entering") for place in firsts.values()]
    points: dict[Point, Reading] = dict.fromkeys(read, ON_HOST)
    for probe in checked.watch:
        points.setdefault(probe.point, WHOLE)
    return points


def entered_by_stack(at: Mapping[Point, Tensor]) -> dict[str, Tensor]:
    """The states that entered each stack that ran, in the order in which they ran."""
    return {stack_of(layer): x for (layer, name), x in at.items() if layer is not None and name == "entering"}


def watched_scores(loaded: LoadedModel, checked: CheckedRequest, at: Mapping[Point, Tensor]) -> list[ProbeScores]:
    """The scores of every token by each probe of a request, of the states at their points."""
    found: list[ProbeScores] = []
    for probe in checked.watch:
        place = loaded.place_of(probe.layer)
        batched = checked.several(place) if probe.name == "output" else checked.several_states(place)
        scores = to_numpy(probe.scores(at[probe.point].flatten(2)))
        found.append(valid(ProbeScores, {"probe": probe.id, "scores": scores if batched else scores[0]}))
    return found
