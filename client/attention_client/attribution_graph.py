"""Paths between components as an attribution graph, in the form that circuit-tracer and Neuronpedia read.

Form: ``graph_models.py`` of https://github.com/safety-research/circuit-tracer 0.5.0, and ``graph-schema.json`` of
https://github.com/hijohnnylin/neuronpedia. Source of such graphs: Ameisen et al. 2025, Circuit Tracing; of paths, Wang
et al. 2022.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.model_effects import ModelEffectsReply
from attention_contract.schemas.analyses.model_paths import PathEnd

_NODE_TYPES: Final = {"heads": "attention head", "mlps": "mlp", "embeddings": "embedding", "logits": "logit"}
_MARGINALS: Final = {"q": "top_q_marginal_contributors", "k": "top_k_marginal_contributors"}


@dataclass
class _Graph:
    """The nodes of one text by their ids, and the links between them."""

    position: int
    """The token that the prediction follows, at which all components stand."""
    token: int
    last: int
    """The number of the last layer."""
    heads: Mapping[int, int]
    """The number of heads of each layer."""
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    links: list[dict[str, Any]] = field(default_factory=list)

    def node(self, part: str, layer: int, head: int, label: str, **more: Any) -> str:
        """Return the id of a node, which is made if it is new."""
        kind = _NODE_TYPES[part]
        place, feature = str(layer), head
        if part == "embeddings":
            place, feature = "E", self.position
        elif part == "mlps":
            feature = self.heads[layer]  # the number after those of the heads
        elif part == "logits":
            place, feature = str(self.last + 2), self.token
        name = f"{place}_{feature}_{self.position}"
        self.nodes.setdefault(
            name,
            {
                "node_id": name, "feature": feature, "layer": place, "ctx_idx": self.position, "feature_type": kind,
                "jsNodeId": f"{place}_{feature}-0", "clerp": label, "run_idx": 0, "reverse_ctx_idx": 0,
                "token_prob": 0.0, "is_target_logit": part == "logits", "activation": None,
            } | more,
        )  # fmt: skip
        return name


def attribution_graph(reply: ModelEffectsReply, slug: str, *, text: int = 0, smallest: float = 0.0) -> dict[str, Any]:
    """Return the paths of a reply of ``effects`` with ``from_`` and ``to`` as a graph, to be written as JSON.

    The nodes are heads, MLPs, the embeddings and the predicted token. Paths have no positions: a component acts at all
    tokens, and its node stands at the last one. The weight of a link is the measured number less that with the
    sender's output changed, along this path alone. What reaches a head by its values is a link; what reaches it by its
    queries and keys are ``qk_tracing_results`` of its node. A key/value head stands in the node of each head that reads
    it, with its whole weight. Weights of a magnitude below ``smallest``, and 0, are left out. ``influence`` is the
    share of all influence on the token that the nodes up to this one have, the most influential first.

    ``slug`` names the graph, and ``text`` is the index of the text. Raises InvalidRequest for a reply without paths or
    without a token, and for layers of several stacks.
    """
    senders, receivers = _ends(reply, "from"), _ends(reply, "to")
    if reply.token is None:
        raise InvalidRequest.at("of", "a graph ends in a predicted token; measure the effect on one")
    labels, value = reply.labels_of(text), np.asarray(reply.effects.value, np.float64)
    weights = -(value if value.ndim == 2 else value[text])  # [from, to]
    heads = _counts(end for end in (*senders, *receivers) if end.part in {"heads", "q"})
    last = max([_layer(component) for component in (*senders, *receivers)])
    graph = _Graph(len(labels.tokens) - 1, reply.token[text], last, heads)
    name = reply.token_names[text] if reply.token_names is not None else str(reply.token[text])
    chance = _probability(reply, text)
    logit = graph.node("logits", -1, -1, f'Output "{name}" (p={chance:.3f})', token_prob=chance)
    from_ids = [graph.node(sender.part, _layer(sender), sender.head or 0, _label(sender)) for sender in senders]
    shared = _counts(end for end in receivers if end.part in {"k", "v"})
    for column, end in enumerate(receivers):
        for target in _targets(graph, end, logit, shared):
            _connect(graph, end, target, from_ids, weights[:, column], smallest)
    _rank(graph, logit)
    return {
        "metadata": {
            "slug": slug, "scan": reply.request_names.title or slug, "transcoder_list": [],
            "prompt_tokens": labels.tokens, "prompt": "".join(labels.tokens),
            "info": {"generator": {"name": "attention-service"}},
        },
        "qParams": {"pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": "", "sg_pos": ""},
        "nodes": [*graph.nodes.values()],
        "links": graph.links,
    }  # fmt: skip


def _ends(reply: ModelEffectsReply, axis: Literal["from", "to"]) -> list[PathEnd]:
    ends = [end for end in reply.swept.get(axis, ()) if isinstance(end, PathEnd)]
    if not ends:
        raise InvalidRequest.at("from", "a graph needs paths: effects with from and to")
    if any(isinstance(end.layer, str) for end in ends):
        raise InvalidRequest.at("layer", "a graph has the layers of one stack; name those of one")
    return ends


def _counts(ends: Iterable[PathEnd]) -> Mapping[int, int]:
    """The number of heads of each layer: one more than the largest that is named."""
    counts: dict[int, int] = defaultdict(int)
    for end in ends:
        counts[_layer(end)] = max(counts[_layer(end)], (end.head or 0) + 1)
    return counts


def _layer(end: PathEnd) -> int:
    return end.layer if isinstance(end.layer, int) else -1


def _label(end: PathEnd) -> str:
    return {"heads": f"L{end.layer}H{end.head}", "mlps": f"MLP {end.layer}", "embeddings": "Embeddings"}[end.part]


def _targets(graph: _Graph, end: PathEnd, logit: str, shared: Mapping[int, int]) -> list[str]:
    """The nodes that an end of a path is of: the heads that read a key/value head. Raises InvalidRequest."""
    if end.part == "logits":
        return [logit]
    layer = _layer(end)
    if end.part == "mlps":
        return [graph.node("mlps", layer, 0, f"MLP {layer}")]
    group, rest = (1, 0) if end.part == "q" else divmod(graph.heads[layer], shared[layer])
    if rest or not group:
        raise InvalidRequest.at("heads", f"a graph needs all heads of layer {layer} in from, to know who reads a key")
    heads = range((end.head or 0) * group, ((end.head or 0) + 1) * group)
    return [graph.node("heads", layer, head, f"L{layer}H{head}") for head in heads]


def _connect(
    graph: _Graph, end: PathEnd, target: str, senders: list[str], weights: NDArray[np.float64], smallest: float
) -> None:
    """Add what reaches a node from each sender: as links, or by queries and keys."""
    reached = [
        (sender, float(weight))
        for sender, weight in zip(senders, weights, strict=True)
        if np.isfinite(weight) and weight != 0 and abs(weight) >= smallest
    ]
    if end.part not in _MARGINALS:
        graph.links += [{"source": sender, "target": target, "weight": weight} for sender, weight in reached]
        return
    empty: dict[str, list[Any]] = {"pair_wise_contributors": [], **{name: [] for name in _MARGINALS.values()}}
    results = graph.nodes[target].setdefault("qk_tracing_results", empty)
    results[_MARGINALS[end.part]] = [list(pair) for pair in sorted(reached, key=lambda incoming: -abs(incoming[1]))]


def _probability(reply: ModelEffectsReply, text: int) -> float:
    """The probability of the token, if the measured number is its logarithm; else 0."""
    baseline = float(np.ravel(reply.baseline)[text])
    return float(np.exp(baseline)) if reply.request_names.measured == "log p({token})" and baseline <= 0 else 0.0


def _rank(graph: _Graph, logit: str) -> None:
    """Set ``influence``, by the normalized magnitudes of the links: Ameisen et al. 2025, graph pruning."""
    names = {name: at for at, name in enumerate(graph.nodes)}
    matrix = np.zeros((len(names), len(names)))  # [target, source]
    for link in graph.links:
        matrix[names[link["target"]], names[link["source"]]] += abs(link["weight"])
    matrix /= np.maximum(matrix.sum(1, keepdims=True), 1e-30)
    step = np.zeros(len(names))
    step[names[logit]] = 1
    influence = step.copy()
    for _ in names:  # no link leads back, so that the steps end
        step = step @ matrix
        influence += step
    order = np.argsort(-influence, kind="stable")
    shares = np.cumsum(influence[order]) / influence.sum()
    for name, at in names.items():
        graph.nodes[name]["influence"] = float(shares[np.flatnonzero(order == at)[0]])
