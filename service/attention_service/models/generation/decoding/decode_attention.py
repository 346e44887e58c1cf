"""The attention function of the passes that generate: PyTorch's own, unless more is asked of it.

A token is chosen by the last query of the pass before it. In a pass of one text its weights are computed again by the
stages, beside whatever computed the output; in a pass of several they are a step of the output. Notation as in
``core.problem``; R texts whose keys lie in one tensor.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from attention_service.core.attention import attend
from attention_service.core.cancellation import checkpoint
from attention_service.core.edits import BoundEdit, narrowed, write
from attention_service.core.inspection.weights import weights_of
from attention_service.core.problem import Selection
from attention_service.core.slices import on_gpu
from attention_service.models.generation.decoding.heard_frames import HeardFrames
from attention_service.models.generation.decoding.last_queries import BY_QUERY, last_queries, last_query
from attention_service.models.generation.decoding.pasts.joined_past import JoinedPast
from attention_service.models.generation.decoding.pasts.text_pasts import PastPart
from attention_service.models.generation.decoding.row_edits import RowEdits
from attention_service.models.generation.decoding.token_attention import PassWeights, TokenAttention, is_cross
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.attention_pass import problem_of
from attention_service.models.passes.device_heads import DeviceHeads, DividedHeads
from attention_service.models.passes.layer_attention import LayerAttention
from attention_service.models.passes.points import Point, Points
from attention_transformers.function_calls import attention_call
from attention_transformers.model_layers import LayerKey
from attention_transformers.registration import forget_function, register_function

_ALIGNED: Final = 16
"""The multiple of keys to which PyTorch's kernels want the rows of a bias aligned; it copies one that is not."""
_UNKNOWN: Final = frozenset({"softcap", "s_aux", "indices", "block_indices", "sinks"})
"""Arguments of an attention function that PyTorch's own does not know: passes with them attend by the core."""


class TextRow(Protocol):
    """A text as the attention of its passes sees it."""

    ids: list[int]
    """All its tokens."""
    seen: int
    """Its tokens of the passes before."""
    edits: "RowEdits"
    heard: HeardFrames | None

    @property
    def looks(self) -> Sequence[TokenAttention]:
        """The reports on the attention of its tokens."""


@dataclass
class _Encoded:
    """A text whose encoder runs."""

    edits: "RowEdits"
    looks: Sequence[TokenAttention] = ()
    heard: HeardFrames | None = None
    seen: int = 0
    ids: list[int] = field(default_factory=list)


class Decoding(Protocol):
    """The attention of one model in the passes that generate."""

    def close(self) -> None:
        """Let the model attend as before."""

    def running(
        self, rows: Sequence[TextRow], joined: JoinedPast | None = None, ends: Sequence[int] | None = None
    ) -> AbstractContextManager[PassWeights]:
        """Let a pass be over these texts: over one, or over one token of each of several, or over whole prompts.

        ``joined``: the pasts of several; ``ends``: the place of the last token of each prompt in its row.
        """


@contextmanager
def preparing(attention: Decoding, edits: RowEdits) -> Iterator[None]:
    """Let an encoder run before the first pass of a text with these edits."""
    with attention.running([_Encoded(edits)]):
        yield


def editing_states(rows: Sequence[TextRow], points: Points) -> AbstractContextManager[None]:
    """Edit the states of the texts of a pass, each text's own alone, until the block ends."""
    edited = dict.fromkeys(point for row in rows for point in row.edits.states)
    return points.changing([(point, _edited(point, rows)) for point in edited])


def _edited(point: Point, rows: Sequence[TextRow]) -> Callable[[Tensor], Tensor]:
    """The state of each text at a point after its edits, ``[B, L, d_model]``."""

    def change(state: Tensor) -> Tensor:
        changed = []
        for at, row in enumerate(rows):
            own = state[at : at + 1]
            queries = range(row.seen, row.seen + state.shape[1])
            changed.append(row.edits.edited(point, queries, own) if point in row.edits.states else own)
        return torch.cat(changed)

    return change


class DecodeAttention:
    """The attention function of one model for the passes that generate."""

    def __init__(self, loaded: LoadedModel, core: LayerAttention) -> None:
        self._model, self._core, self._points = loaded.model, core, loaded.points
        self._own_mask = sdpa_mask if loaded.model._supports_sdpa else eager_mask
        self._name = register_function(self, self._mask)
        self._rows: Sequence[TextRow] = ()
        self._edited = self._tells = False
        """True if texts of the pass have edits, and if anything is asked of its attention or changed in it."""
        self._joined: JoinedPast | None = None
        self._ends: Tensor | None = None
        self._pass_weights: PassWeights | None = None
        self._biases: dict[Hashable, tuple[Any, Tensor]] = {}
        """The masks and biases of the pass, and the biases made of them."""

    def close(self) -> None:
        """Forget the function; the model attends by its own again."""
        self._core.use(self._model)
        forget_function(self._name)

    @contextmanager
    def running(
        self, rows: Sequence[TextRow], joined: JoinedPast | None = None, ends: Sequence[int] | None = None
    ) -> Iterator[PassWeights]:
        """Let a pass be over these texts, as ``Decoding`` says."""
        self._core.give_way(self._model, self._name)
        self._core.restart()
        self._rows, self._joined, self._pass_weights = rows, joined, PassWeights()
        self._ends = None if ends is None else torch.tensor(ends, device=self._model.device)
        for row in rows:
            self._edited = self._edited or bool(row.edits)
            self._tells = self._tells or bool(row.looks) or row.heard is not None
        self._tells = self._tells or self._edited
        try:
            with editing_states(rows, self._points) if self._edited else nullcontext():
                yield self._pass_weights
        finally:
            self._rows, self._joined, self._ends, self._pass_weights = (), None, None, None
            self._edited = self._tells = False
            self._biases.clear()

    def _mask(self, *args: Any, **kwargs: Any) -> Any:
        """The mask of a pass as PyTorch's function takes it; that of several texts is of each one's keys."""
        return self._own_mask(*args, **kwargs) if self._joined is None else None

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Attend as transformers asks. Returns the output ``[B, Lq, H, Dv]``."""
        if self._joined is not None:
            layer = self._core.turns.layer_of(module) if self._tells else None
            parts = self._joined.parts(key, value)
            outputs = [self._part(module, layer, query[part.rows], part, options) for part in parts]
            if len(outputs) > 1:
                return torch.cat(outputs).transpose(1, 2).contiguous(), None
            return outputs[0].transpose(1, 2), None
        if query.shape[2] > 1:  # a pass over one token is short
            checkpoint()
        edits = list[BoundEdit]()
        if self._ends is not None:
            self._tell_ends(module, query, key, value, attention_mask, options)
        elif self._tells:
            (row,) = self._rows
            layer = self._core.turns.layer_of(module)
            edits = self._inside(module, row, layer, query, key) if self._edited else edits
            told = PassWeights() if self._pass_weights is None else self._pass_weights
            looks = list[TokenAttention]()  # by a loop: a comprehension is one more call for each layer and token
            for look in row.looks:
                if look.wants(layer):
                    looks.append(look)
            hears = row.heard is not None and row.heard.wants(layer)
            if looks or hears:
                last = last_query(module, query, key, value, attention_mask, options)
                own = narrowed(edits, Selection(queries=(query.shape[2] - 1,)), 1, 1) if edits else edits
                share = None if self._core.share is None else self._share_of(module, layer, query)
                if hears and row.heard is not None:
                    row.heard.see(layer, last, own, share)
                shared = last if not BY_QUERY.isdisjoint(options) and _has(options, BY_QUERY) else attention_mask
                for look in looks:
                    told.see(look, layer, last, own, shared)
        if edits or (not _UNKNOWN.isdisjoint(options) and _has(options, _UNKNOWN)):
            raw = attention_call(module, query, key, value, attention_mask, **options).raw()
            kernel = self._core.kernel(raw, edits=bool(edits))[1]
            return attend(problem_of(raw), (), edits=edits, kernel=kernel).context.transpose(1, 2).contiguous(), None
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    def _tell_ends(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
        options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Tell of the last query of each prompt of a pass over several."""
        layer = self._core.turns.layer_of(module) if self._tells else None
        if layer is None or self._pass_weights is None or self._ends is None or not _looked_at(layer, self._rows):
            return
        asked = last_queries(module, query, key, value, mask, options, self._ends)
        self._share_of(module, layer, query)
        _tell(layer, self._rows, weights_of(asked, Selection()), self._pass_weights)

    def _share_of(self, module: nn.Module, layer: LayerKey, query: Tensor) -> DeviceHeads | None:
        """The part of all heads that a call has, as the weights of the pass learn; None if it has all."""
        share = self._core.share_of(module, heads := query.shape[1])
        if share is not None and self._pass_weights is not None:
            self._pass_weights.divide(layer, DividedHeads(share, heads))
        return share

    def _inside(
        self, module: nn.Module, row: TextRow, layer: LayerKey, query: Tensor, key: Tensor
    ) -> list[BoundEdit]:  # fmt: skip
        """The edits of a text as they apply to one call; a sliding cache has only the last keys."""
        queries, keys = range(row.seen, row.seen + query.shape[2]), key.shape[2]
        first = 0 if is_cross(layer) else max(queries.stop - keys, 0)
        share = None if self._core.share is None else self._core.share_of(module, query.shape[1])
        return self._edits(row, layer, queries, (query, key), range(first, first + keys), share)

    @staticmethod
    def _edits(
        row: TextRow, layer: LayerKey, queries: range, states: tuple[Tensor, Tensor], keys: range,
        share: DeviceHeads | None,
    ) -> list[BoundEdit]:  # fmt: skip
        """The edits of a text for these queries and keys. ``states``: queries and keys with the heads of a call."""
        heads, kv_heads = (x.shape[1] for x in states)
        if share is None:
            return row.edits.inside(layer, queries, (heads, kv_heads), keys)
        every = heads * share.devices, kv_heads * share.devices
        return share.own_edits(row.edits.inside(layer, queries, every, keys), heads, kv_heads)

    def _part(
        self, module: nn.Module, layer: LayerKey | None, query: Tensor, part: PastPart, options: Mapping[str, Any]
    ) -> Tensor:
        """The context ``[R, H, 1, Dv]`` of texts whose keys lie in one tensor. ``layer``: None if nothing is asked."""
        rows = self._rows[part.rows]
        edited = [at for at, row in enumerate(rows) if row.edits]
        hearing = [row.heard for row in rows if layer is not None and row.heard is not None and row.heard.wants(layer)]
        looking = bool(hearing) or (layer is not None and _looked_at(layer, rows))
        weights: Tensor | None = None
        bias = self._position_bias(options.get("position_bias"), part)
        if _has(options, _UNKNOWN):
            mask = None if part.key_mask is None else part.key_mask[:, None, None]
            own = _of_rows(options, part.rows) | ({} if bias is None else {"position_bias": bias})
            call = attention_call(module, query, part.key, part.value, mask, **{**options, **own})
            raw = call.raw(whole=True)
            problem = problem_of(raw)
            weights = weights_of(problem, Selection()) if looking else None
            context = attend(problem, (), kernel=self._core.kernel(raw, edits=False)[1]).context
        elif on_gpu(query) and not looking:
            context = self._one_call(query, part, options.get("scaling"), bias)
        else:
            weights, context = _weighed(query, part, options.get("scaling"), bias)
        if layer is None:
            return context
        share = None if self._core.share is None else self._share_of(module, layer, query)
        for at in edited:
            seen = part.seen[at]
            row = rows[at]
            edits = self._edits(row, layer, range(row.seen, row.seen + 1), (query, part.key), seen, share)
            if all(edit.tap == "context" for edit in edits):
                write(edits, "context", context[at : at + 1])
                continue
            one = self._edited_row(module, query, part, at, seen, options, edits)
            context[at] = one[0][0]
            if weights is not None and one[1] is not None:
                weights[at] = nn.functional.pad(one[1][0], (seen.start, weights.shape[-1] - seen.stop))
        if weights is not None and self._pass_weights is not None:
            heard = share.whole(weights) if hearing and share is not None else weights
            for at, row in enumerate(rows):
                if row.heard is not None and row.heard.wants(layer):
                    row.heard.take(layer, heard[at, :, 0, : part.seen[at].stop])
                if part.encoded:  # of an encoder's tokens, each text has its own alone
                    _tell(layer, [row], weights[at : at + 1, ..., : part.seen[at].stop], self._pass_weights)
            if not part.encoded:
                _tell(layer, rows, weights, self._pass_weights)
        return context

    def _one_call(self, query: Tensor, part: PastPart, scale: float | None, added: Tensor | None) -> Tensor:
        """The context ``[R, H, 1, Dv]`` by one kernel: the heads of a group are the queries of their keys."""
        rows, heads, _, width = query.shape
        q = query.view(rows, part.key.shape[1], -1, width)
        bias = None if part.key_mask is None else self._bias(part.key_mask, query.dtype)
        if added is not None:
            added = added.reshape(len(added), q.shape[1], -1, added.shape[-1])
            bias = added if bias is None else bias + added
        context = scaled_dot_product_attention(q, part.key, part.value, bias, scale=scale)
        return context.reshape(rows, heads, 1, -1)

    def _position_bias(self, given: Tensor | None, part: PastPart) -> Tensor | None:
        """The bias ``[R or 1, H, 1, K]`` of the distances of a part, made once a pass for layers that share theirs.

        ``given``: ``[B or 1, H, 1, K]``. One for all rows is that of the longest text, and by distance; the others' is
        its end.
        """
        if given is None:
            return None
        place = id(given), part.rows.start, part.encoded
        if place not in self._biases:
            keys, ends = part.key.shape[2], [seen.stop for seen in part.seen]
            own = given[..., :keys] if len(given) == 1 else given[part.rows, ..., :keys]
            if len(given) == 1 and not part.encoded and min(ends) < given.shape[-1]:
                shifts = given.shape[-1] - torch.tensor(ends, device=given.device)[:, None]
                index = (torch.arange(keys, device=given.device)[None] + shifts).clamp_(max=given.shape[-1] - 1)
                own = given[0, :, 0][:, index].transpose(0, 1)[:, :, None]
            self._biases[place] = given, own
        return self._biases[place][1]

    def _bias(self, seen: Tensor, dtype: torch.dtype) -> Tensor:
        """The bias ``[R, 1, 1, K]`` of the keys that are seen, made once a pass for all layers that see the same."""
        if id(seen) not in self._biases:
            rows, keys = seen.shape
            aligned = seen.new_full((rows, 1, 1, -(-keys // _ALIGNED) * _ALIGNED), -torch.inf, dtype=dtype)
            self._biases[id(seen)] = seen, aligned[..., :keys].masked_fill_(seen[:, None, None], 0)
        return self._biases[id(seen)][1]

    def _edited_row(
        self, module: nn.Module, query: Tensor, part: PastPart, at: int, keys: range, options: Mapping[str, Any],
        edits: Sequence[BoundEdit],
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """The context and the weights of one text of a part after its edits, by the stages.

        ``keys``: those that its query sees.
        """
        row, number = self._rows[part.rows][at], part.rows.start + at
        key, value = (x[at : at + 1, :, keys.start : keys.stop] for x in (part.key, part.value))
        own = _of_rows(options, slice(number, number + 1))
        if (bias := self._position_bias(options.get("position_bias"), part)) is not None:
            own["position_bias"] = bias[at : at + 1] if len(bias) > 1 else bias
            own["position_bias"] = own["position_bias"][..., keys.start : keys.stop]
        raw = attention_call(module, query[at : at + 1], key, value, None, **{**options, **own}).raw(whole=True)
        problem = problem_of(raw)
        context = attend(problem, (), edits=edits, kernel=self._core.kernel(raw, edits=True)[1]).context
        return context, weights_of(problem, Selection(), edits) if row.looks else None


def _looked_at(layer: LayerKey, rows: Sequence[TextRow]) -> bool:
    """True if texts of a pass report on a layer."""
    return any(look.wants(layer) for row in rows for look in row.looks)


def _tell(layer: LayerKey, rows: Sequence[TextRow], weights: Tensor, pass_weights: PassWeights) -> None:
    """Give the weights ``[R, H, 1, K]`` of a layer to the reports of these texts."""
    for number in range(max(len(row.looks) for row in rows)):
        pass_weights.add(layer, [row.looks[number] if number < len(row.looks) else None for row in rows], weights)


def _has(options: Mapping[str, Any], names: frozenset[str]) -> bool:
    """True if a call has an argument of these names."""
    return not names.isdisjoint(options) and any(options.get(name) is not None for name in names)


def _weighed(
    query: Tensor, part: PastPart, scale: float | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The weights ``[R, H, 1, K]`` and the context of one query a text, without copies of keys for grouped heads."""
    rows, heads, _, width = query.shape
    groups = part.key.shape[1]
    q = query.view(rows, groups, heads // groups, width)
    scores = torch.matmul(q, part.key.transpose(-1, -2)) * (width**-0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias.reshape(len(bias), groups, heads // groups, bias.shape[-1])
    if part.key_mask is not None:
        scores = scores.masked_fill(~part.key_mask[:, None, None], -torch.inf)
    weights = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    context = torch.matmul(weights, part.value)
    return weights.view(rows, heads, 1, -1), context.view(rows, heads, 1, -1)


def _of_rows(options: Mapping[str, Any], rows: slice) -> dict[str, Tensor]:
    """The arguments with a dimension of queries, but for the bias, as they are for some texts."""
    given = {name: tensor for name in BY_QUERY - {"position_bias"} if (tensor := options.get(name)) is not None}
    return {name: tensor if len(tensor) == 1 else tensor[rows] for name, tensor in given.items()}
