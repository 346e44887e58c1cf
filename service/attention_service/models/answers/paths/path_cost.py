"""The cost of paths between the components of a model, before they are measured."""

from collections import Counter
from math import ceil

from attention_contract.schemas.analyses.model_paths import PathReceivers
from attention_contract.schemas.costs.model_complexity import ModelComplexityRequest, PassCost, SweepCost
from attention_service.models.answers.paths.path_ends import PathEnds, path_ends
from attention_service.models.answers.paths.path_models import check_stack
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.costs.model_pace import multiple_of
from attention_service.models.costs.pass_memory import SweepSizes
from attention_service.models.loaded.loaded_model import LoadedModel


def sizes_of_paths(loaded: LoadedModel, ends: PathEnds, texts: SweepSizes, runs: int) -> SweepSizes:
    """The sizes of texts with what their components send, in so many runs, and with what those of each path receive."""
    width = int(loaded.model.config.get_text_config().hidden_size)
    heads = {each.attention.key: each.attention.widths for each in ends.senders if each.end.part == "heads"}
    sent = sum(each.heads * each.value_dim for each in heads.values())
    others = [each for each in (*ends.senders, *ends.receivers) if each.end.part in {"mlps", "embeddings"}]
    taps = [each.attention.widths for each in ends.receivers if each.end.part in {"q", "k", "v"}]
    of_head = max((each.heads * max(each.head_dim, each.value_dim) for each in taps), default=0)
    kept = runs * (sent + 2 * len(others) * width)
    # Of a path: its change, its states with and without it, and the queries, keys or values before and after.
    return texts._replace(kept=kept, of_copy=4 * width + 3 * of_head)


def path_cost(
    loaded: LoadedModel, costs: ModelCosts, request: ModelComplexityRequest, prefill: PassCost, free_bytes: int
) -> SweepCost:
    """Price the paths of a request over texts of its length; ``prefill``: a pass over them. Raises InvalidRequest."""
    senders, receivers = request.from_, PathReceivers() if request.to is None else request.to
    if senders is None:
        raise TypeError("expected the beginnings of paths")
    check_stack(loaded)
    ends = path_ends(loaded, senders, receivers, [*loaded.places.values()])
    runs = 1 if senders.text is None and senders.tokens is None else 2
    texts = sizes_of_paths(loaded, ends, SweepSizes(request.batch, request.length, request.length), runs)
    paths, count = ends.paths, loaded.shared_layers.count
    most = len(paths)
    copies = costs.memory.copies_at_once(texts, most, free_bytes)
    two, one = (costs.rows_cost(request.batch, request.length, rows).flops for rows in (2, 1))
    head = two - one  # of one row of logits
    layers = max(0, prefill.flops - head)
    groups = Counter((ends.of(path)[1].layer, ends.of(path)[1].end.part) for path in paths)
    passes, rows, read = runs, 0.0, 0.0
    for (layer, part), many in groups.items():
        times = ceil(many / copies)
        of_layers = (count - layer) / count
        if part in {"q", "k", "v"}:  # a layer more, for each beginning, tells what its ends receive
            passes += times
            rows += min(many, len(ends.senders) + times) / count
            read += times / count
        passes += times
        rows += many * of_layers
        read += times * of_layers
    flops = runs * prefill.flops + rows * layers + len(paths) * head
    return SweepCost(
        edits=len(paths),
        passes=passes,
        flops=round(flops),
        bytes=round(prefill.bytes * (runs + read)),
        peak_bytes=costs.memory.sweep_bytes(texts, copies),
        **multiple_of(prefill, flops / max(1, prefill.flops)),
    )
