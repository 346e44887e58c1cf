"""The cost of a sweep of edits over every layer of a model, before it runs."""

from dataclasses import replace
from math import ceil, prod

from attention_contract.schemas.analyses.model_effects import ModelSweptEdit
from attention_contract.schemas.costs.model_complexity import ModelComplexityRequest, SweepCost
from attention_service.models.answers.sweeps.swept_edits import check_swept, is_swept, swept_axes
from attention_service.models.costs.implicit_costs import most_matrix_bytes
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.costs.pass_memory import SweepSizes
from attention_service.models.costs.question_stages import sweep_stage
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.module_taps import MODULE_TAPS


def sweep_cost(
    loaded: LoadedModel, costs: ModelCosts, request: ModelComplexityRequest, sweep: ModelSweptEdit, free_bytes: int
) -> SweepCost:
    """Price a sweep over texts of the sizes of a request. Raises InvalidRequest."""
    batch, length, images = costs.sized(request)
    places = [
        place
        for place in loaded.all_places
        if place.queries != "media" and (place.mixes == "attention" or is_swept(loaded, sweep, place))
    ]
    check_swept(sweep, places, "sweep")
    target = costs.target_of(request) or length
    tokens = {"target": target}
    sizes = {
        place.key: {
            "heads": place.widths.kv_heads if sweep.tap in {"k", "v"} else place.widths.heads,
            "queries": tokens.get(place.queries or "", length),
            "keys": tokens.get(place.keys or "", length),
        }
        for place in places
    }
    swept = swept_axes(sweep, sizes)
    edits, shared = prod(map(len, swept.values())), loaded.shared_layers
    begins = swept.get("layers", [places[0].key])
    depth = sum(1 - shared.first([layer]) / shared.count if shared.count else 1 for layer in begins) / len(begins)
    implicit = [place for place in places if place.mixes != "attention"]
    beside_bytes = costs.memory.sized_bytes(batch, images)
    alone = implicit or sweep.tap in MODULE_TAPS or loaded.head.unit == "choice" or not loaded.stacks_texts
    most = 1 if alone or beside_bytes else edits
    if sweep.tap == "weights":
        beside_bytes += most_matrix_bytes(loaded, implicit, batch, length)
    texts = SweepSizes(batch, target, length, beside_bytes=beside_bytes)
    copies = costs.memory.copies_at_once(texts, most, free_bytes)
    first = sweep_stage(costs.memory, texts, copies, images)
    passes = len(begins) * ceil(edits / len(begins) / copies)
    changed = replace(first, times=edits * depth, reads=passes * depth)
    cost = costs.priced("forward", [first, changed])
    return SweepCost(edits=edits, passes=1 + passes, **vars(cost))
