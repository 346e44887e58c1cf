"""The memory, operations and time of passes of a whole model: its matrices, and the attention of each of its layers.

Notation: B texts, L tokens, H heads, V the size of the vocabulary. A matrix ``[m, k]`` takes 2·m·k FLOPs a token.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.lenses import LensPart
from attention_contract.schemas.costs.model_complexity import ModelComplexityReply, ModelComplexityRequest, PassCost
from attention_service.cost import Traffic, flops
from attention_service.models.costs.image_costs import image_tokens
from attention_service.models.costs.implicit_costs import implicit_flops
from attention_service.models.costs.lens_costs import check_has_unembedding, check_predicts_next, lens_cost
from attention_service.models.costs.model_pace import ModelPace, times_of, unlearned
from attention_service.models.costs.model_sizes import ModelSizes
from attention_service.models.costs.pass_memory import PassMemory
from attention_service.models.inputs.input_stacks import SizedImage
from attention_service.models.loaded.checked_request import CheckedRequest
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.runtime.operations.complexity.capacity import last_that

_SHORT: Final = 512
"""Tokens of passes that take less than a second on any machine."""
_SLOWER: Final = 8
"""The time of a pass on a busy machine, as a multiple of the prediction."""
_OPERATIONS: Final = 100
"""Operations of a layer, with what Python does between them, in the units of the clock."""
_OF_SCORES: Final = 16
"""Times that each score is written until its weight is known and counted in statistics."""
_COUNTS: Final = 2**63
"""A count that no reply can have."""
_FURTHEST: Final = 2**31 - 1


class ModelCosts:
    """The costs of passes of one model."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded, self._sizes = loaded, ModelSizes(loaded)
        self.memory = PassMemory(loaded, self._sizes)
        self.pace = ModelPace()

    def rows_cost(self, texts: int, length: int, rows: int) -> PassCost:
        """The cost of a pass over texts of so many tokens that tells of so many rows of logits of each."""
        peak_bytes = self.memory.rows_bytes(texts, length, rows)
        rows = rows if self._sizes.rows_alone else length
        found = self._cost(texts, length, length, weights=False)
        products = found.flops + 2 * texts * self._sizes.head * (rows - 1)
        return PassCost(
            flops=products, bytes=found.bytes, peak_bytes=peak_bytes,
            **unlearned(found.predicted_ms * products / max(1, found.flops)),
        )  # fmt: skip

    def attention_flops(self, length: int) -> int:
        """The matrix products of all attentions over one text."""
        return sum(_attention_flops(place, 1, length, length) for place in self._sizes.places)

    def silent_seconds(self, checked: CheckedRequest, passes: int = 1) -> float:
        """Return a bound of the time of so many passes; 0 if they are short."""
        batch, length = checked.inputs.predicted.ids.shape
        return self.seconds_of(batch, max(length, checked.inputs.text.length), passes)

    def seconds_of(self, texts: int, length: int, passes: int = 1) -> float:
        """Return a bound of the time of so many passes over texts of so many tokens; 0 if they are short."""
        if passes * texts * length <= _SHORT:
            return 0.0
        return passes * _SLOWER * self._cost(texts, length, length, weights=True).predicted_ms / 1e3

    def pass_ms(self, texts: int, length: int, *, weights: bool = False, after: int = 0) -> float:
        """Milliseconds of a pass over texts of so many tokens, ``after`` so many others, without what was learned."""
        return self._cost(texts, length, after + length, weights=weights).predicted_ms

    # ── the question about costs ─────────────────────────────────────────────────────────────────────────────────────

    def report(self, request: ModelComplexityRequest, free_bytes: int) -> ModelComplexityReply:
        """Tell what a text and its images cost, and a generation after it, with so many bytes of memory free.

        Raises InvalidRequest.
        """
        sizes = {"length": request.length, "new_tokens": request.new_tokens, "batch": request.batch}
        largest = max(sizes, key=sizes.__getitem__)
        refusal = InvalidRequest.at(largest, "its counts do not fit 64 bits; ask for smaller sizes")
        try:
            reply = self._report(request, free_bytes)
        except InvalidRequest as fault:
            raise (refusal if fault.param == "shape" else fault) from None  # which is no field of this request
        passes = [
            each for each in (reply.prefill, reply.per_token, reply.vision, reply.lens, reply.fit) if each is not None
        ]
        counts = [count for each in passes for count in (each.flops, each.bytes, each.peak_bytes)]
        if max(reply.cache_bytes, *counts) >= _COUNTS:
            raise refusal
        return reply

    def _report(self, request: ModelComplexityRequest, free_bytes: int) -> ModelComplexityReply:
        sizes = self._sizes
        images, encodes = sizes.images.sized(request.images), sizes.images.encodes
        if encodes and not images:
            raise InvalidRequest.at("images", "this model reads only images; send their sizes")
        if encodes and request.new_tokens:
            raise InvalidRequest.at("new_tokens", "an encoder of images generates nothing")
        shown = max((image.text for image in images), default=0) if encodes else sum(image.text for image in images)
        batch, length = (request.batch * len(images), shown) if encodes else (request.batch, request.length + shown)
        last = length + request.new_tokens

        def fits(batch: int, tokens: int) -> bool:
            need = self.memory.peak(batch, tokens, images, weights=request.weights)
            return batch * self.memory.cache_bytes(tokens) + need <= free_bytes

        prefill = self._cost(batch, length, length, images, weights=request.weights)
        step = self._cost(batch, 1, last + 1, weights=request.weights)
        if encodes:
            step = PassCost(flops=0, bytes=0, peak_bytes=0, **unlearned(0.0))
        fields: dict[str, Any] = {}
        if images:
            alone = prefill if encodes else self._cost(batch, 0, 0, images, weights=request.weights)
            fields = {"images": image_tokens(images), "vision": self._learned("forward", alone)}
        if request.lens:
            fields["lens"] = self._learned("lens", self._lens(request.lens, prefill, batch * length))
        if request.fit:
            fields["fit"] = self._learned("fit", self._fit(request.batch, length))
        limit = shown if encodes else self._loaded.reader.max_length or _FURTHEST
        most = last_that(lambda each: fits(each, last), _FURTHEST)
        kind = "weights" if request.weights else "reading" if request.new_tokens else "forward"
        prefill, step = self._learned(kind, prefill), self._learned("tokens", step)
        return ModelComplexityReply(
            model=self._loaded.name,
            parameters=sum(each.numel() for each in sizes.parameters),
            parameter_bytes=sizes.parameter_bytes,
            prefill=prefill,
            per_token=step,
            total_ms=prefill.predicted_ms + request.new_tokens * step.predicted_ms,
            total_low_ms=prefill.predicted_low_ms + request.new_tokens * step.predicted_low_ms,
            total_high_ms=prefill.predicted_high_ms + request.new_tokens * step.predicted_high_ms,
            cache_bytes_per_token=self.memory.cache_bytes(1) - self.memory.cache_bytes(0),
            cache_bytes=batch * self.memory.cache_bytes(last),
            max_batch=most // len(images) if encodes else most,
            max_length=max(0, last_that(lambda tokens: fits(batch, tokens), limit) - (0 if encodes else shown)),
            **fields,
        )

    def _learned(self, kind: str, cost: PassCost) -> PassCost:
        """The cost with its time corrected by the runs of this kind."""
        return cost.model_copy(update=times_of(self.pace.estimate(kind, cost.predicted_ms)))

    def _lens(self, parts: Sequence[LensPart], prefill: PassCost, tokens: int) -> PassCost:
        """The cost of a pass whose states are read at every one of so many tokens."""
        check_has_unembedding(self._loaded, "lens")
        wanted = "target" if self._loaded.reader.pairs else "text"
        places = [each for each in self._loaded.all_places if each.queries == wanted]
        cost = lens_cost(self._loaded, parts, places, tokens)
        traffic = cost.traffic
        rates = self._loaded.device.clock.rated(lambda rates: rates.seconds(traffic, self._sizes.itemsize))
        return PassCost(
            flops=prefill.flops + traffic.products,
            bytes=prefill.bytes + traffic.read,
            peak_bytes=prefill.peak_bytes + cost.peak_bytes,
            **unlearned(prefill.predicted_ms + 1e3 * rates.median),
        )

    def _fit(self, texts: int, length: int) -> PassCost:
        """The cost of all rows of the Jacobians of texts: a pass forward and one backward for each."""
        check_predicts_next(self._loaded, "fit")
        rows = min(self._sizes.width, self.memory.jacobian_rows(length, self._loaded.device.free_bytes()))
        once, passes = self._cost(rows, length, length, weights=False), 3 * texts * -(-self._sizes.width // rows)
        return PassCost(
            flops=passes * once.flops,
            bytes=passes * once.bytes,
            peak_bytes=self.memory.graph_bytes(rows, length) + 12 * self._sizes.layers * self._sizes.width**2,
            **unlearned(passes * once.predicted_ms),
        )

    def _cost(
        self, batch: int, tokens: int, keys: int, images: Sequence[SizedImage] = (), *, weights: bool
    ) -> PassCost:
        """The cost of a pass over new tokens, after ``keys`` − ``tokens`` others, and over images, if any come."""
        sizes = self._sizes
        encodes, itemsize = sizes.images.encodes, sizes.itemsize
        times = self.memory.times(batch, images)
        products = times * sizes.images.products(images)
        layers, parameters, cached, states = 0, sizes.images.parameter_bytes if images else 0, 0, 0
        if images:
            crops, length = sizes.images.shape(images)
            layers = len(sizes.images.places)
            states = layers * times * crops * length * sizes.image_numbers
        adapter = self._loaded.adapters.active
        if adapter is not None:
            products += 2 * adapter.numbers * batch * max(tokens, 1)
            parameters += adapter.files.bytes
        if tokens and not encodes:
            products += batch * (2 * sizes.matrices * tokens + 2 * sizes.head)
            products += sum([_attention_flops(place, batch, tokens, keys) for place in sizes.places])
            products += implicit_flops(sizes.implicit, batch, tokens) if weights else 0
            layers += sizes.layers
            parameters += sizes.parameter_bytes - sizes.images.parameter_bytes
            cached = batch * self.memory.cache_bytes(keys)
            states += sizes.layers * batch * tokens * sizes.layer_numbers
            if weights and tokens == keys:
                states += _OF_SCORES * batch * tokens * keys * sum([place.widths.heads for place in sizes.places])
        states *= itemsize
        half = products if itemsize == 2 else 0
        traffic = Traffic(
            parameters + cached + states, states, operations=_OPERATIONS * layers, products=products, half_products=half
        )
        rates = self._loaded.device.clock.rated(lambda rates: rates.seconds(traffic, itemsize))
        peak = self.memory.peak(batch, tokens, images, keys, weights=weights)
        return PassCost(flops=products, bytes=parameters + cached, peak_bytes=peak, **unlearned(1e3 * rates.median))


@lru_cache(maxsize=4096)  # asked before each pass; a process has one model
def _attention_flops(place: AttentionPlace, batch: int, tokens: int, keys: int) -> int:
    """The matrix products of one attention over the pairs that its masks allow, and of what is cached before."""
    if tokens == keys:
        return flops(place.bound(batch, tokens, keys), masked=True).matmul
    widths, keys = place.widths, keys if place.reach is None else min(keys, place.reach)
    pairs = widths.heads * tokens * keys
    return batch * (2 * pairs * (widths.head_dim + widths.value_dim) + place.expansion_flops(keys - tokens))
