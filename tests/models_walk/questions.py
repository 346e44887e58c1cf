"""The younger questions to one model type, each held to a property: by separate passes of transformers or of this.

Each is asked of a batch of texts of unequal lengths, and held to the same of each text alone.
"""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.context import ContextRequest
from attention_contract.schemas.analyses.lenses import ModelLensRequest
from attention_contract.schemas.analyses.model_effects import ModelEffectsRequest
from attention_contract.schemas.attention import Edit
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_contract.schemas.openai import EmbeddingRequest
from attention_contract.schemas.text_similarity import TextSimilarityRequest
from attention_contract.validation import validate
from attention_service.models.answers.context.context_plan import ContextPlan, plan_context
from attention_service.models.answers.context.context_run import ContextRun
from attention_service.models.answers.lenses.lens_plan import plan_lens
from attention_service.models.answers.lenses.lens_reply import LensRun
from attention_service.models.answers.lenses.residual_stream import ResidualStream, find_stream
from attention_service.models.answers.paths.path_effects import EffectsOfPaths
from attention_service.models.answers.sweeps.swept_effects import EffectsOfSweep
from attention_service.models.answers.text_embeddings import EmbeddingPlan, embed, plan_embedding
from attention_service.models.answers.vector_similarity import plan_similarity, similarity_reply
from attention_service.models.costs.answer_parts import at_once
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.inputs.input_stacks import Tokens
from attention_service.models.loaded.checked_request import check_request
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.attention_pass import AttentionPass, LayerTask
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.models.passes.layer_states import LayerStates
from attention_service.models.passes.module_hooks import first_of, with_first

IDS: Final = [5, 3, 7, 8, 6, 4, 9, 10, 11]
TEXTS: Final = [IDS, IDS[:5]]
PAIR: Final = ("the cat sat on the mat", "the dog sat on the")
PROMPT, ANSWER = "the cat sat on\nthe dog on mat\nthe mat", "\nthe dog sat\non mat"
_TOKEN: Final = 7
"""The token whose log-probability is measured."""
_SPAN: Final = 1e-3
"""Effects below this are compared by their size in log-probabilities: rounding is a share of these."""
_FREE: Final = 2**30
_CAP: Final = re.compile("soft_?cap")
"""In the names of the entries of configs that cap logits or scores."""


def error(found: Any, expected: Any, least: float = 1e-30) -> float:
    """Return the largest difference as a share of the largest expected number, which counts as ``least`` at least."""
    a, b = (np.asarray(x.detach().cpu() if isinstance(x, Tensor) else x, np.float64) for x in (found, expected))
    if a.shape != b.shape:
        raise ValueError(f"shapes {a.shape} and {b.shape}")
    if not np.isfinite(b).all() or not np.isfinite(a).all():
        return 0.0 if np.array_equal(a, b, equal_nan=True) else float("inf")
    return float(abs(a - b).max(initial=0) / max(abs(b).max(initial=0), least))


# ── vectors ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def embeddings(model: PreTrainedModel, loaded: LoadedModel) -> float:
    """Vectors of a padded batch are those of each text alone, and the pooled states of transformers."""
    found = _vectors(loaded, TEXTS)
    plan = plan_embedding(loaded, EmbeddingRequest(model="m", input=TEXTS))
    with torch.no_grad():
        alone = [_eager_vector(model, loaded, plan, ids)[0] for ids in TEXTS]
    own = [_vectors(loaded, [ids])[0] for ids in TEXTS]
    return max(*map(error, own, alone), *map(error, found, own))


def _vectors(loaded: LoadedModel, texts: list[list[int]]) -> list[Any]:
    request = EmbeddingRequest(model="m", input=texts)
    return [each.embedding for each in embed(loaded, request, plan_embedding(loaded, request)).data]


def similarity(model: PreTrainedModel, loaded: LoadedModel) -> float:
    """The cosine of two texts of unequal lengths, and gradient · embedding by token, are those of transformers."""
    request = TextSimilarityRequest(pairs=[PAIR])
    planned = plan_similarity(loaded, request)
    reply = similarity_reply(loaded, request, planned)
    one, other = (_eager_vector(model, loaded, planned.plan, ids) for ids in planned.plan.rows)
    cosine = torch.cosine_similarity(one[0], other[0], dim=0)
    gradients = torch.autograd.grad(cosine, [one[1], other[1]])
    shares = [
        _by_token(gradient * leaf, len(ids))
        for gradient, leaf, ids in zip(gradients, (one[1], other[1]), planned.plan.rows, strict=True)
    ]
    found = [
        np.asarray([share for share, token in zip(row, labels.tokens, strict=True)], np.float64)
        for row, labels in zip(reply.tokens[0], reply.labels[0], strict=True)
    ]
    real = _real(loaded, planned.stack)
    # A norm right behind the table makes each sum 0 up to rounding: a share of its summands.
    least = max(
        float((each * leaf).detach().abs().sum(-1).max())
        for each, (_, leaf) in zip(gradients, (one, other), strict=True)
    )
    apart = max(error(row[keep], own, least) for row, keep, own in zip(found, real, shares, strict=True))
    return max(apart, abs(reply.similarity[0] - float(cosine.detach())))


def _real(loaded: LoadedModel, stack: Any) -> list[Any]:
    if stack.mask is None:
        return [slice(None)] * len(stack.ids)
    return [row.cpu().numpy() for row in stack.mask]


def _eager_vector(
    model: PreTrainedModel, loaded: LoadedModel, plan: EmbeddingPlan, ids: list[int]
) -> tuple[Tensor, Tensor]:
    """The vector of one text in transformers, and the embeddings that it is made of."""
    states, leaf = _eager_states(model, loaded, loaded.reader.batch([Tokens(ids, [None] * len(ids))]))
    return _pooled(plan, states[0][: len(ids)]), leaf


def _pooled(plan: EmbeddingPlan, states: Tensor) -> Tensor:
    """The mean of the states of a text, or its last one, of length 1."""
    vector = states[-1] if plan.settings.modes == ("lasttoken",) else states.mean(0)
    return nn.functional.normalize(vector, dim=0)


def _eager_states(model: PreTrainedModel, loaded: LoadedModel, stack: Any) -> tuple[Tensor, Tensor]:
    """The last states ``[B, L, d]`` of texts in transformers, and the embeddings that are fed for them."""
    reads: Any = model.get_encoder() if loaded.reader.pairs else model
    table: Any = getattr(reads, "get_input_embeddings", model.get_input_embeddings)()
    arguments: dict[str, Any] = dict(loaded.reader.arguments(stack))
    if "use_cache" in loaded.reader.names and not loaded.reader.pairs:
        arguments["use_cache"] = False
    leaves: list[Tensor] = []

    def feed(_: Any, __: Any, output: Tensor) -> Tensor | None:
        if leaves:
            return None
        leaves.append(output.detach().clone().requires_grad_())
        return leaves[0].clone()

    hook = table.register_forward_hook(feed)
    bases: list[Any] = []
    own = model.base_model.register_forward_hook(lambda _, __, output: bases.append(output))
    with _hooked([hook, own]):
        output = reads(**arguments, output_hidden_states=True, return_dict=True)
    last = output.get("last_hidden_state")
    states = output["hidden_states"][-1] if last is None else last
    base = getattr(bases[0] if bases else None, "last_hidden_state", None)
    if base is not None and base.shape != states.shape:  # of several streams, or of two halves
        states = base
    if states.shape[:2] == stack.ids.shape[::-1] != stack.ids.shape:
        states = states.transpose(0, 1)
    return states, leaves[0]


def _by_token(product: Tensor, length: int) -> Tensor:
    """The sums ``[L]`` over the width of ``[1, L, d]`` or ``[L, 1, d]``, without tokens that a model adds itself."""
    return product.sum(-1).flatten()[:length].detach()


# ── lens ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def lens(model: PreTrainedModel, loaded: LoadedModel) -> float:
    """The last layer's reading is the logits, and the parts of a logit add up to it, alone and in a batch."""
    stream = _stream(loaded)
    logits = _eager_logits(model, loaded)
    targets = [int(each) for each in np.argsort(-logits)[:3]]
    last = [*stream.places][-1]
    options: list[dict[str, Any]] = [{"of": ["hidden"], "layers": [last]}]
    errors = list[float]()
    if not stream.without_parts:
        options.append({"of": ["output"]})
        heads = all(branch.projection is not None for branch in stream.branches.values())
        options += [{"of": ["heads"]}] if heads else []
    for fields in options:
        alone = [_lens(loaded, stream, ids, targets, **fields) for ids in TEXTS]
        batches = [] if loaded.reader.mixes_padding(len(IDS)) else [_lens(loaded, stream, TEXTS, targets, **fields)]
        if fields["of"] == ["hidden"]:
            readings = [np.asarray(each.layers[-1].hidden.targets)[0] for each in alone]
            if stream.places[last].layer is stream.last:
                errors.append(error(readings[0], logits[targets]))
            batched = [np.asarray(each.layers[-1].hidden.targets)[:, 0] for each in batches]
        else:
            part = fields["of"][0]
            readings = [_total(each, part, None) for each in alone]
            errors += [
                error(reading, np.asarray(each.logits)[0]) for reading, each in zip(readings, alone, strict=True)
            ]
            errors.append(error(readings[0], logits[targets]) if not _is_capped(loaded) else 0.0)
            batched = [np.stack([_total(each, part, row) for row in range(len(TEXTS))]) for each in batches]
        errors += [error(each, readings) for each in batched]
    return max(errors, default=0.0)


def _lens(loaded: LoadedModel, stream: ResidualStream, tokens: Any, targets: list[int], **fields: Any) -> Any:
    request = ModelLensRequest(tokens=tokens, positions=[-1], targets=targets, **fields)
    return LensRun(loaded, plan_lens(loaded, request, stream)).reply()


def _total(reply: Any, part: str, row: int | None) -> np.ndarray:
    """The sum ``[T]`` of all parts of the logits at the one position, of one text of a batch."""

    def of(x: Any) -> np.ndarray:
        return np.asarray(x, np.float64) if row is None else np.asarray(x, np.float64)[row]

    rest = reply.rest
    total = of(rest.embeddings)[0] + of(rest.mlps).sum(0)[0] + of(rest.others)[0] + np.asarray(rest.unembedding)
    for layer in reply.layers:
        targets = of(getattr(layer, part).targets)
        total = total + (targets.sum(0)[0] if part == "heads" else targets[0])
    return np.asarray(total + of(rest.biases).sum(0)[0] if part == "heads" else total)


def _is_capped(loaded: LoadedModel) -> bool:
    entries = loaded.model.config.get_text_config().to_dict()
    return any(_CAP.search(name) and value is not None for name, value in entries.items())


@lru_cache(maxsize=1)
def _stream(loaded: LoadedModel) -> ResidualStream:
    return find_stream(loaded)


# ── effects and paths ────────────────────────────────────────────────────────────────────────────────────────────────


def effects(_: PreTrainedModel, loaded: LoadedModel) -> float:
    """The effect of each edit of a sweep is the difference of two forward passes."""
    wanted = "target" if loaded.reader.pairs else "text"
    places = [
        place for place in loaded.places.values()
        if place.queries == wanted and (place.taps is None or "context" in place.taps)
    ]  # fmt: skip
    ends = [places[0], places[-1]] if places else [*loaded.places.values()][:1]
    heads = [*{0, min((place.widths.heads for place in ends), default=1) - 1}]
    sweep = {"tap": "context", "over": ["layers", "heads"], "heads": heads, "set": 0}
    keys = [place.key for place in dict.fromkeys(ends)]
    request = {"layers": keys or "all", "sweep": sweep, "of": {"position": -1, "token": _TOKEN}}
    found = [_effects(loaded, tokens=IDS, **request)]
    texts = [IDS] if loaded.reader.mixes_padding(len(IDS)) else TEXTS
    found += [_effects(loaded, tokens=ids, **request) for ids in texts[1:]]
    clean = [_log(_logits(loaded, ids), _TOKEN) for ids in texts]
    expected = [
        [[_without_head(loaded, ids, key, head) - before for head in heads] for key in keys]
        for ids, before in zip(texts, clean, strict=True)
    ]
    errors = [error(one, other, _SPAN) for one, other in zip(found, expected, strict=True)]
    if len(texts) > 1:
        errors.append(error(_effects(loaded, tokens=texts, **request), found, _SPAN))
    return max(errors)


def _effects(loaded: LoadedModel, **fields: Any) -> np.ndarray:
    run = EffectsOfSweep(loaded, validate(ModelEffectsRequest, fields))
    while not run.has_ended:
        run.advance(max(1, min(3, run.copies)))
    return np.asarray(run.reply().effects.value, float)


def _without_head(loaded: LoadedModel, ids: list[int], key: Any, head: int) -> float:
    edits = {str(key): [{"tap": "context", "heads": [head], "set": 0}]}
    return _log(_logits(loaded, ids, edits=edits), _TOKEN)


def paths(model: PreTrainedModel, loaded: LoadedModel) -> float:
    """A path to the logits is the pass whose last states lack what its beginning adds, by hooks of plain torch."""
    stream = _stream(loaded)
    place = next((each for each in stream.places.values() if each.mixes == "attention"), None)
    senders = ["embeddings", "heads", "mlps"]
    logits, token = _eager_logits(model, loaded), _TOKEN
    request: dict[str, Any] = {
        "from": {"parts": senders, **({} if place is None else {"layer": place.key})},
        "to": {"parts": ["logits"]}, "of": {"position": -1, "token": token},
    }  # fmt: skip
    run = EffectsOfPaths(loaded, validate(ModelEffectsRequest, {"tokens": IDS, **request}), stream)
    while not run.has_ended:
        run.advance(run.copies)
    found = np.asarray(run.reply().effects.value, float).reshape(-1)
    if place is None:
        raise TypeError("paths of a model without attention")
    expected = [_log(each, token) - _log(logits, token) for each in _without(model, loaded, stream, place)]
    errors = [error(found, expected, _SPAN)]
    if not loaded.reader.mixes_padding(len(IDS)):
        both = EffectsOfPaths(loaded, validate(ModelEffectsRequest, {"tokens": TEXTS, **request}), stream)
        while not both.has_ended:
            both.advance(both.copies)
        errors.append(error(np.asarray(both.reply().effects.value, float)[0].reshape(-1), found, _SPAN))
    return max(errors)


@torch.no_grad()
def _without(
    model: PreTrainedModel, loaded: LoadedModel, stream: ResidualStream, place: AttentionPlace
) -> Iterator[np.ndarray]:
    """The logits of eager passes whose last states lack the embeddings, an MLP, or a head of one layer."""
    names = {module: name for name, module in loaded.model.named_modules()}
    branch = stream.branches[place.key]
    if branch.projection is None:
        raise TypeError(branch.without_heads)
    first, layer, last, source, projection = (
        model.get_submodule(names[each])
        for each in (stream.layers[0], place.layer, stream.last, branch.source, branch.projection)
    )
    states: dict[str, Tensor] = {}

    def given(name: str) -> Callable[..., None]:
        def keep(_: Any, args: Any, options: Any) -> None:
            states[name] = (args[0] if args else options["hidden_states"]).clone()

        return keep

    def made(name: str) -> Callable[..., None]:
        return lambda _, __, output: states.update({name: first_of(output).clone()})

    hooks = [
        first.register_forward_pre_hook(given("embeddings"), with_kwargs=True),
        layer.register_forward_pre_hook(given("layer"), with_kwargs=True),
        layer.register_forward_hook(made("made")), source.register_forward_hook(made("source")),
        projection.register_forward_pre_hook(given("heads"), with_kwargs=True),
    ]  # fmt: skip
    with _hooked(hooks):
        _eager_logits(model, loaded)
    own = dict(states)
    yield _with_last(model, loaded, last, -own["embeddings"])
    heads, width = place.widths.heads, place.widths.value_dim
    for head in range(heads):
        zeroed = own["heads"].clone()
        zeroed[..., head * width : (head + 1) * width] = 0
        hooks = [
            projection.register_forward_pre_hook(lambda *_, zeroed=zeroed: (zeroed,)),
            source.register_forward_hook(made("source")),
        ]
        with _hooked(hooks):
            _eager_logits(model, loaded)
        yield _with_last(model, loaded, last, branch.factor * (states["source"] - own["source"]))
    beside = own["made"] - own["layer"] - branch.factor * own["source"]
    yield _with_last(model, loaded, last, -beside)


def _with_last(model: PreTrainedModel, loaded: LoadedModel, last: nn.Module, change: Tensor) -> np.ndarray:
    """The logits if the last layer's states have this change."""
    hook = last.register_forward_hook(lambda _, __, output: with_first(output, first_of(output) + change))
    with _hooked([hook]):
        return _eager_logits(model, loaded)


@contextmanager
def _hooked(hooks: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# ── context ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def context(model: PreTrainedModel, loaded: LoadedModel) -> float:
    """The log-probability of an answer without a source is that of a pass of its own."""
    errors = list[float]()
    for name in ("removed", "hidden"):
        request = validate(ContextRequest, {"text": PROMPT, "answer": ANSWER, "return": [name]})
        try:
            plan = plan_context(loaded, request)
        except InvalidRequest:
            if name == "removed":
                raise
            continue  # one whose keys cannot be hidden one by one
        run = ContextRun(loaded, ModelCosts(loaded), request, plan, _FREE)
        found = np.asarray(getattr(at_once(run.parts()).ablation, name), float)
        errors.append(error(found, _ablated(model, loaded, plan, name), _SPAN))
    return max(errors)


def _ablated(model: PreTrainedModel, loaded: LoadedModel, plan: ContextPlan, name: str) -> np.ndarray:
    """The change of each sentence's log-probability ``[S, A]`` without a source, by separate passes."""
    ids = plan.inputs.text.ids[0].tolist()
    clean = _sentences(_all_logits(model, loaded, ids), ids, plan)
    found = []
    for source in plan.sources:
        if name == "removed":
            kept = [token for at, token in enumerate(ids) if at not in source.tokens]
            logits = _all_logits(model, loaded, kept)
            found.append(_sentences(logits, kept, plan))
            continue
        keys = [*source.tokens]
        hidden = Edit(tap="masked_scores", keys=keys, set=-math.inf)  # beside a sink, whose share grows
        if loaded.attention.way == "observed":
            hidden = Edit(tap="weights", keys=keys, set=0.0, renormalize=True)
        edits = {str(place.key): [hidden] for place in plan.places}
        found.append(_sentences(_every_logit(loaded, ids, edits=edits)[0], ids, plan))
    return np.stack(found) - clean


def _sentences(logits: np.ndarray, ids: list[int], plan: ContextPlan) -> np.ndarray:
    """The log-probability of each sentence of an answer at the end of a text."""
    count = len(plan.answers)
    logs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    logs = logs - logits.max(-1, keepdims=True)
    own = np.asarray([logs[at - 1, ids[at]] for at in range(len(ids) - count, len(ids))])
    return np.asarray([own[each.tokens.start : each.tokens.stop].sum() for each in plan.sentences])


# ── logits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def _all_logits(model: PreTrainedModel, loaded: LoadedModel, ids: list[int]) -> np.ndarray:
    """The logits ``[L, V]`` of one text in transformers."""
    inputs = loaded.reader.read(ModelForwardRequest(tokens=ids))
    cache = {"use_cache": False} if "use_cache" in loaded.reader.names else {}
    return np.asarray(model(**inputs.arguments, **cache, return_dict=True).logits[0].cpu(), np.float64)


def _eager_logits(model: PreTrainedModel, loaded: LoadedModel) -> np.ndarray:
    """The logits ``[V]`` behind the text in transformers."""
    return np.asarray(_all_logits(model, loaded, IDS)[-1])


def _logits(loaded: LoadedModel, tokens: Any, **more: Any) -> np.ndarray:
    """The logits ``[V]`` behind the last real token of a text, or of each text."""
    rows = [row[-1] for row in _every_logit(loaded, tokens, **more)]
    return np.stack(rows) if isinstance(tokens[0], list) else rows[0]


@torch.no_grad()
def _every_logit(loaded: LoadedModel, tokens: Any, edits: Any = None) -> list[np.ndarray]:
    """The logits ``[L, V]`` of each text in a pass of the service, with edits."""
    request = ModelForwardRequest(tokens=tokens, edits=edits or {})
    checked = check_request(loaded, request, lambda _: True)
    tasks = {
        place.key: LayerTask(edits=request.edits.get(str(place.key), ()), key_mask=checked.keys(place).mask)
        for place in loaded.all_places
    }
    attention_pass = AttentionPass(tasks)
    with LayerStates(loaded.all_places, attention_pass).reading((), output=False, hidden=False):
        logits = loaded.run(checked.inputs.arguments, attention_pass).logits.cpu()
    mask = checked.inputs.predicted.mask
    real = [slice(None)] * len(logits) if mask is None else [row.cpu() for row in mask]
    return [np.asarray(row[keep], np.float64) for row, keep in zip(logits, real, strict=True)]


def _log(logits: np.ndarray, token: int) -> float:
    return float(logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum()))


QUESTIONS: Final[dict[str, Callable[[PreTrainedModel, LoadedModel], float]]] = {
    "embeddings": embeddings, "similarity": similarity, "lens": lens, "effects": effects, "paths": paths,
    "context": context,
}  # fmt: skip
