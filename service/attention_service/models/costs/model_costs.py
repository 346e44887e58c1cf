"""The operations and the time of the stages of questions: a model's matrices, and the attention of each of its layers.

Notation: B texts, L tokens, H heads, V the size of the vocabulary. A matrix ``[m, k]`` takes 2·m·k FLOPs a token.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final, NamedTuple

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.costs.model_complexity import ModelComplexityReply, ModelComplexityRequest, PassCost
from attention_service.cost import NOTHING, Traffic, flops
from attention_service.models.costs.generation_memory import generation_bytes
from attention_service.models.costs.image_costs import image_tokens
from attention_service.models.costs.implicit_costs import implicit_flops
from attention_service.models.costs.lens_costs import lens_cost
from attention_service.models.costs.masked_passes import check_masked, masked_stage
from attention_service.models.costs.model_pace import ModelPace, times_of
from attention_service.models.costs.model_sizes import ModelSizes
from attention_service.models.costs.pass_memory import PassMemory
from attention_service.models.costs.question_stages import Stage, held, lens_stages
from attention_service.models.inputs.input_stacks import SizedImage
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.streams.readout import check_has_unembedding
from attention_service.models.passes.attention_places import BOTH, AttentionPlace
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
_NO_PASS: Final = PassCost(
    flops=0, bytes=0, peak_bytes=0, predicted_ms=0.0, predicted_low_ms=0.0, predicted_high_ms=0.0
)  # fmt: skip


class PassWork(NamedTuple):
    """The work of passes."""

    flops: int
    bytes: int
    ms: float
    """Milliseconds, without what was learned."""


class ModelCosts:
    """The costs of the stages of questions to one model."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded, self._sizes = loaded, ModelSizes(loaded)
        self.memory = PassMemory(loaded, self._sizes)
        self.pace = ModelPace()

    def work(self, stage: Stage) -> PassWork:
        """The work of a stage."""
        one, sizes = self._pass(stage), self._sizes
        own = stage.predicted
        head = 2 * stage.texts * sizes.head if own and not sizes.images.encodes else 0
        rows = stage.rows if sizes.rows_alone else own
        products = one.flops + head * (rows - 1)
        every = stage.times * products
        if stage.rows_of_all is not None and sizes.rows_alone:
            every = stage.times * (one.flops - head) + stage.rows_of_all * head
        if stage.gradients:  # backward, a product by a matrix costs as much as forward, and one of two states twice
            every += stage.gradients * (products + self._attended(replace(stage, after=0)))
        reads = stage.times if stage.reads is None else stage.reads
        times = every / one.flops if one.flops else stage.times
        pass_work = PassWork(round(every), round(reads * one.bytes), one.ms * times)
        if (beside := stage.beside) is None:
            return pass_work
        rates = self._loaded.device.clock.rated(lambda rates: rates.seconds(beside, sizes.itemsize))
        return PassWork(
            pass_work.flops + beside.products, pass_work.bytes + beside.read, pass_work.ms + 1e3 * rates.median
        )

    def priced(self, kind: str, stages: Sequence[Stage]) -> PassCost:
        """The cost of stages that follow each other, with their times corrected by the runs of a kind."""
        works = [self.work(stage) for stage in stages]
        times = [
            self.pace.estimate(kind, work.ms / repeats).times(repeats)
            for work, repeats in zip(works, (max(1.0, stage.times) for stage in stages), strict=True)
        ]
        return PassCost(
            flops=sum(work.flops for work in works), bytes=sum(work.bytes for work in works),
            peak_bytes=held(stages), **times_of(sum(times, NOTHING)),
        )  # fmt: skip

    def seconds(self, stage: Stage, share: float = 1.0, kind: str = "") -> float:
        """Return a bound of the time of a stage, or of so many times that; 0 if it is short.

        ``kind``: of the runs that correct it.
        """
        if share * stage.times * stage.texts * stage.length <= _SHORT:
            return 0.0
        ms = share * self.work(replace(stage, weights=True)).ms
        return _SLOWER * ms / 1e3 * max(1.0, self.pace.ratio(kind, ms))

    # ── the question about costs ─────────────────────────────────────────────────────────────────────────────────────

    def report(self, request: ModelComplexityRequest, free_bytes: int) -> ModelComplexityReply:
        """Tell what a text and its images cost, and a generation after it, with so many bytes of memory free.

        Raises InvalidRequest.
        """
        try:
            return check_counts(request, self._report(request, free_bytes))
        except InvalidRequest as fault:
            raise (_too_large(request) if fault.param == "shape" else fault) from None  # no field of this request

    def _report(self, request: ModelComplexityRequest, free_bytes: int) -> ModelComplexityReply:
        sizes, memory = self._sizes, self.memory
        batch, length, images = self.sized(request)
        encodes, last = sizes.images.encodes, length + request.new_tokens

        generates = request.new_tokens and not request.weights and self._loaded.model.can_generate()
        target = self.target_of(request)

        def need(batch: int, tokens: int) -> int:
            """All memory besides the model, for so many tokens with the new ones."""
            if generates:
                prompt, alone = max(1, tokens - request.new_tokens), bool(request.alone)
                pass_bytes = generation_bytes(self._loaded, batch, prompt, request.new_tokens, alone=alone)
                return max(
                    pass_bytes + memory.sized_bytes(batch, images), batch * sum(image.decoding for image in images)
                )
            return batch * memory.cache_bytes(tokens) + memory.peak(batch, tokens, images, weights=request.weights)

        def stage(tokens: int, after: int = 0, images: Sequence[SizedImage] = ()) -> Stage:
            peak_bytes = memory.peak(batch, tokens, images, after + tokens, weights=request.weights)
            return Stage(batch, tokens, peak_bytes=peak_bytes, weights=request.weights, after=after, images=images)

        cache_bytes = batch * memory.cache_bytes(last)
        whole = replace(stage(length, images=images), target=target)
        if generates:
            whole = replace(whole, peak_bytes=need(batch, last) - cache_bytes)
        kind = "weights" if request.weights else "reading" if request.new_tokens else "forward"
        prefill = self.priced(kind, [whole])
        step = _NO_PASS if encodes else self.priced("tokens", [self.step(stage(1, last), length)])
        fields: dict[str, Any] = {}
        if images:
            vision = self.priced("forward", [whole if encodes else stage(0, images=images)])
            fields = {"images": image_tokens(images), "vision": vision}
        if request.lens:
            check_has_unembedding(self._loaded, "lens")
            wanted = "text" if target is None else "target"
            places = [place for place in self._loaded.all_places if place.queries == wanted]
            readings = lens_cost(self._loaded, request.lens, places, batch * (target or length))
            fields["lens"] = self.priced("lens", lens_stages(whole, readings))
        if request.likelihood:
            check_masked(self._loaded, "likelihood")
            fields["likelihood"] = self.priced(
                "likelihood", [masked_stage(self._loaded, memory, batch * length, length)]
            )
        shown = length - (0 if encodes else request.length)
        limit = length if encodes else self._loaded.reader.max_length or _FURTHEST
        most = last_that(lambda texts: need(texts, last) <= free_bytes, _FURTHEST)
        longest = last_that(lambda tokens: need(batch, tokens) <= free_bytes, limit)
        return ModelComplexityReply(
            model=self._loaded.name,
            parameters=sum(parameter.numel() for parameter in sizes.parameters),
            parameter_bytes=sizes.parameter_bytes,
            prefill=prefill,
            per_token=step,
            total_ms=prefill.predicted_ms + request.new_tokens * step.predicted_ms,
            total_low_ms=prefill.predicted_low_ms + request.new_tokens * step.predicted_low_ms,
            total_high_ms=prefill.predicted_high_ms + request.new_tokens * step.predicted_high_ms,
            cache_bytes_per_token=memory.cache_bytes(1) - memory.cache_bytes(0),
            cache_bytes=cache_bytes,
            max_batch=most // len(images) if encodes else most,
            max_length=max(0, longest - (0 if encodes else shown)),
            **fields,
        )

    def target_of(self, request: ModelComplexityRequest) -> int | None:
        """The tokens of each target of a question about costs; None for a model without. Raises InvalidRequest."""
        if self._loaded.reader.pairs:
            return request.target_length or (1 if request.new_tokens else request.length)
        if request.target_length is not None:
            raise InvalidRequest.at("target_length", "the model has no decoder beside an encoder; leave it out")
        return None

    def reading(self, stage: Stage) -> Stage:
        """The stage of reading a prompt: of a model with an encoder and a decoder, with the decoder's first token."""
        return replace(stage, target=1) if self._loaded.reader.pairs else stage

    def step(self, stage: Stage, prompt: int) -> Stage:
        """The stage of one further token: of a model with an encoder and a decoder, of the decoder alone."""
        if not self._loaded.reader.pairs:
            return stage
        return replace(stage, length=0, target=1, after=stage.after - prompt, encoded=prompt)

    def sized(self, request: ModelComplexityRequest) -> tuple[int, int, list[SizedImage]]:
        """The texts of a question about costs, their tokens with those of images, and the images of each.

        Raises InvalidRequest.
        """
        images = self._sizes.images.sized(request.images)
        if not self._sizes.images.encodes:
            return request.batch, request.length + sum(image.text for image in images), images
        if not images:
            raise InvalidRequest.at("images", "this model reads only images; send their sizes")
        if request.new_tokens:
            raise InvalidRequest.at("new_tokens", "an encoder of images generates nothing")
        return request.batch * len(images), max(image.text for image in images), images

    def _pass(self, stage: Stage) -> PassWork:
        """The work of one pass over the tokens of a stage and its images, which makes one row of logits."""
        sizes, batch, tokens, images = self._sizes, stage.texts, stage.length, stage.images
        own = stage.predicted
        encodes, itemsize, keys = sizes.images.encodes, sizes.itemsize, stage.after + own
        products = layers = parameters = cached = states = 0
        if images:
            times, (crops, length) = self.memory.times(batch, images), sizes.images.shape(images)
            products, parameters = times * sizes.images.products(images), sizes.images.parameter_bytes
            layers = len(sizes.images.places)
            states = layers * times * crops * length * sizes.image_numbers
        adapter = self._loaded.adapters.active
        if adapter is not None:
            products += 2 * adapter.numbers * batch * max(tokens, 1)
            parameters += adapter.files.bytes
        if own and not encodes:
            of_text = sizes.matrices - sizes.target_matrices
            products += 2 * batch * (of_text * tokens + sizes.target_matrices * own + sizes.head)
            products += self._attended(stage)
            products += implicit_flops(sizes.implicit, batch, tokens) if stage.weights and sizes.implicit else 0
            layers += sizes.layers
            parameters += sizes.parameter_bytes - sizes.images.parameter_bytes
            cached = batch * self.memory.cache_bytes(keys)
            states += batch * (sizes.layers_of_text * tokens + sizes.layers_of_target * own) * sizes.layer_numbers
            if stage.weights and not stage.after:
                states += _OF_SCORES * batch * tokens * keys * sum([place.widths.heads for place in sizes.places])
        states *= itemsize
        half = products if itemsize == 2 else 0
        traffic = Traffic(
            parameters + cached + states, states, operations=_OPERATIONS * layers, products=products, half_products=half
        )
        rates = self._loaded.device.clock.rated(lambda rates: rates.seconds(traffic, itemsize))
        return PassWork(products, parameters + cached, 1e3 * rates.median)

    def _attended(self, stage: Stage) -> int:
        """The matrix products of all attentions of a pass."""
        own = stage.predicted
        text = stage.length + stage.encoded
        counted = 0
        for place in self._sizes.places:
            queries = own if place.queries == "target" else stage.length
            keys = queries + stage.after
            if place.queries == "target" and place.keys != "target":
                keys = text + (keys if place.keys == BOTH else 0)
            counted += _attention_flops(place, stage.texts, queries, keys) if queries else 0
        return counted


def check_counts(request: ModelComplexityRequest, reply: ModelComplexityReply) -> ModelComplexityReply:
    """Return a reply. Raises InvalidRequest for sizes whose counts no reply can have."""
    costs = [cost for cost in vars(reply).values() if isinstance(cost, PassCost)]
    counts = [count for each in costs for count in (each.flops, each.bytes, each.peak_bytes)]
    if max(reply.cache_bytes, *counts) >= _COUNTS:
        raise _too_large(request)
    return reply


def _too_large(request: ModelComplexityRequest) -> InvalidRequest:
    sizes = {"length": request.length, "new_tokens": request.new_tokens, "batch": request.batch}
    sizes |= {"target_length": request.target_length or 0}
    largest = max(sizes, key=sizes.__getitem__)
    return InvalidRequest.at(largest, "its counts do not fit 64 bits; ask for smaller sizes")


@lru_cache(maxsize=4096)  # asked before each pass; a process has one model
def _attention_flops(place: AttentionPlace, batch: int, tokens: int, keys: int) -> int:
    """The matrix products of one attention over the pairs that its masks allow, and of what is cached before."""
    if tokens == keys or place.keys == "text" != place.queries:
        return flops(place.bound(batch, tokens, keys), masked=True).matmul
    widths, keys = place.widths, keys if place.reach is None else min(keys, place.reach)
    pairs = widths.heads * tokens * keys
    return batch * (2 * pairs * (widths.head_dim + widths.value_dim) + place.expansion_flops(keys - tokens))
