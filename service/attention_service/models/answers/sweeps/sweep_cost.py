"""The cost of a sweep of edits over every layer of a model, before it runs."""

from math import ceil, prod

from attention_contract.schemas.costs.model_complexity import ModelComplexityRequest, PassCost, SweepCost
from attention_service.models.answers.sweeps.swept_edits import check_swept, is_swept, swept_axes
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.costs.model_pace import multiple_of
from attention_service.models.costs.pass_memory import SweepSizes
from attention_service.models.loaded.loaded_model import LoadedModel


def sweep_cost(
    loaded: LoadedModel, costs: ModelCosts, request: ModelComplexityRequest, prefill: PassCost, free_bytes: int
) -> SweepCost:
    """Price the sweep of a request over texts of its length; ``prefill``: one pass over them. Raises InvalidRequest."""
    sweep = request.sweep
    if sweep is None:
        raise TypeError("expected a sweep")
    places = [
        each
        for each in loaded.all_places
        if each.queries != "media" and (each.mixes == "attention" or is_swept(sweep, each))
    ]
    check_swept(sweep, places, "sweep")
    sizes = {
        each.key: {
            "heads": each.widths.kv_heads if sweep.tap in {"k", "v"} else each.widths.heads,
            "queries": request.length,
            "keys": request.length,
        }
        for each in places
    }
    swept = swept_axes(sweep, sizes)
    edits, shared = prod(map(len, swept.values())), loaded.shared_layers
    begins = swept.get("layers", [places[0].key])
    depth = sum(1 - shared.first([layer]) / shared.count if shared.count else 1 for layer in begins) / len(begins)
    alike = all(each.mixes == "attention" for each in places)
    able = alike and loaded.stacks_texts and loaded.head.unit != "choice"
    texts = SweepSizes(request.batch, request.length, request.length)
    most = edits if able else 1
    copies = costs.memory.copies_at_once(texts, most, free_bytes)
    passes = 1 + len(begins) * ceil(edits / len(begins) / copies)
    return SweepCost(
        edits=edits,
        passes=passes,
        flops=round(prefill.flops * (1 + edits * depth)),
        bytes=round(prefill.bytes * (1 + (passes - 1) * depth)),
        peak_bytes=costs.memory.sweep_bytes(texts, copies),
        **multiple_of(prefill, 1 + edits * depth),
    )
