"""The cost of paths between the components of a model, before they are measured."""

from collections import Counter
from dataclasses import replace
from math import ceil

from attention_contract.schemas.analyses.model_paths import PathReceivers, PathSenders
from attention_contract.schemas.costs.model_complexity import ModelComplexityRequest, SweepCost
from attention_service.models.answers.paths.path_ends import PathEnds, path_ends
from attention_service.models.answers.paths.path_models import check_stack
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.costs.pass_memory import SweepSizes
from attention_service.models.costs.question_stages import sweep_stage
from attention_service.models.loaded.loaded_model import LoadedModel


def sizes_of_paths(loaded: LoadedModel, ends: PathEnds, texts: SweepSizes, runs: int) -> SweepSizes:
    """The sizes of texts with what their components send, in so many runs, and with what those of each path receive."""
    width = int(loaded.model.config.get_text_config().hidden_size)
    heads = {sender.attention.key: sender.attention.widths for sender in ends.senders if sender.end.part == "heads"}
    sent = sum(widths.heads * widths.value_dim for widths in heads.values())
    others = [
        component for component in (*ends.senders, *ends.receivers) if component.end.part in {"mlps", "embeddings"}
    ]
    taps = [receiver.attention.widths for receiver in ends.receivers if receiver.end.part in {"q", "k", "v"}]
    of_head = max((widths.heads * max(widths.head_dim, widths.value_dim) for widths in taps), default=0)
    kept = runs * (sent + 3 * len(others) * width)
    # Of a path: its change, its states with and without it, and the queries, keys or values before and after.
    return texts._replace(kept=kept, of_copy=4 * width + 3 * of_head)


def path_cost(
    loaded: LoadedModel, costs: ModelCosts, request: ModelComplexityRequest, senders: PathSenders, free_bytes: int
) -> SweepCost:
    """Price paths over texts of the sizes of a request. Raises InvalidRequest."""
    batch, length, images = costs.sized(request)
    check_stack(loaded)
    ends = path_ends(loaded, senders, request.to or PathReceivers(), [*loaded.places.values()])
    runs = 1 if senders.text is None and senders.tokens is None else 2
    texts = SweepSizes(batch, length, length, beside_bytes=costs.memory.sized_bytes(batch, images))
    texts = sizes_of_paths(loaded, ends, texts, runs)
    paths, count = ends.paths, loaded.shared_layers.count
    copies = costs.memory.copies_at_once(texts, len(paths), free_bytes)
    groups = Counter((ends.of(path)[1].layer, ends.of(path)[1].end.part) for path in paths)
    passes, rows, reads = runs, 0.0, 0.0
    for (layer, part), many in groups.items():
        times = ceil(many / copies)
        of_layers = (count - layer) / count
        if part in {"q", "k", "v"}:  # a layer more, for each beginning, tells what its ends receive
            passes += times
            rows += min(many, len(ends.senders) + times) / count
            reads += times / count
        passes += times
        rows += many * of_layers
        reads += times * of_layers
    first = replace(sweep_stage(costs.memory, texts, copies, images), times=runs)
    changed = replace(first, times=rows, reads=reads, rows_of_all=len(paths))
    return SweepCost(edits=len(paths), passes=passes, **vars(costs.priced("forward", [first, changed])))
