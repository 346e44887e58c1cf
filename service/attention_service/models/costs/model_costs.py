"""The memory, operations and time of passes of a whole model: its matrices, and the attention of each of its layers.

Notation: B texts, L tokens, H heads, V the size of the vocabulary. A matrix ``[m, k]`` takes 2·m·k FLOPs a token.
"""

from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.lenses import LensPart
from attention_contract.schemas.costs.model_complexity import ModelComplexityReply, ModelComplexityRequest, PassCost
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest, ModelWeightsRequest
from attention_contract.schemas.prompts import ModelInput
from attention_service.core.blocks import scores_at_once
from attention_service.cost import Traffic, flops
from attention_service.models.costs.image_costs import ImageCosts, image_tokens
from attention_service.models.costs.implicit_costs import implicit_bytes, implicit_flops, matrix_bytes, shown_places
from attention_service.models.costs.lens_costs import check_predicts_next, lens_cost
from attention_service.models.costs.model_pace import ModelPace
from attention_service.models.inputs.input_stacks import SizedImage, Stack
from attention_service.models.loaded.checked_request import CheckedRequest
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.attention_places import BOTH, TEXT, AttentionPlace, kinds_of
from attention_service.models.passes.layer_attention import ROOM
from attention_service.models.passes.module_taps import CHOSEN
from attention_service.runtime.operations.complexity.capacity import last_that

STATES_OF_CACHED_PASS: Final = 24
"""Tensors as wide as the hidden states, of every token read, that a layer has at once in a pass that caches."""
_SHORT: Final = 512
"""Tokens of passes that take less than a second on any machine."""
_SLOWER: Final = 8
"""The time of a pass on a busy machine, as a multiple of the prediction."""
_STATES: Final = 12
"""Tensors as wide as the hidden states that one layer holds at once."""
_INNER: Final = 4
"""The same as wide as the widest matrix."""
_KEPT_STATES: Final = 16
"""Tensors as wide as the hidden states that the graph keeps of each layer."""
_SCORES: Final = 4
"""Matrices of scores and weights that a layer holds at once, or that the graph keeps of it."""
_OWN_SCORES: Final = 6
"""The same of a layer whose model computes them itself, all at once, with the copies of what is asked of them."""
_TILES: Final = 8 * 4
"""Bytes of a tile in which weights are inspected, for each of its scores."""
_STATISTICS: Final = 16
"""Numbers that are told of each head, or of each of its queries."""
_COPIES: Final = 2
"""Times that a reply is in memory, if it goes through the pipe: in the model's process and in the server's."""
_OF_POINTS: Final = 2**29
"""Bytes that texts, or points of an integrated gradient, which are one batch may take; more would hardly be faster."""
_LOGS: Final = 4 * 8
"""Bytes for each logit of a prediction that is compared with another in float64."""
_ROWS: Final = 64
"""The most rows of a Jacobian that are differentiated at once."""
_PAIR_TAPS: Final = frozenset({"scores", "capped_scores", "masked_scores", "weights"})
_COUNTS: Final = 2**63
"""A count that no reply can have."""
_FURTHEST: Final = 2**31 - 1


def own_scores_bytes(loaded: LoadedModel, batch: int, queries: int, keys: int) -> int:
    """The memory of the scores and weights of one layer, if the model computes them itself; else 0."""
    if loaded.attention.way == "computed":
        return 0
    heads = max(each.widths.heads for each in loaded.places.values())
    return _OWN_SCORES * 4 * batch * heads * queries * keys


class SweepSizes(NamedTuple):
    """The sizes of the texts of a sweep of edits."""

    batch: int
    length: int
    keys: int
    """Tokens of the text that the keys are of."""
    positions: int = 1
    """Positions of each text whose predictions are measured."""


class ModelCosts:
    """The costs of passes of one model."""

    def __init__(self, loaded: LoadedModel) -> None:
        model = loaded.model
        vision = getattr(model.config, "vision_config", None)
        self._loaded, self._images = loaded, ImageCosts(loaded)
        self.pace = ModelPace()
        encodes, every = self._images.encodes, [*loaded.places.values()]
        config = vision if encodes and vision is not None else model.config.get_text_config()
        self._width = int(config.hidden_size)
        known = int(getattr(config, "vocab_size", 0) or loaded.reader.vocabulary)
        self._vocabulary = len(loaded.head.classes) or known
        self._itemsize = model.dtype.itemsize
        self._tile_bytes = _TILES * scores_at_once(gpu=loaded.device.is_cuda)
        self._parameters = [*model.parameters()]
        head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._head = 0 if head is None else head.weight.numel()
        self._inner = max((max(each.shape) for each in _weights(model, [head])), default=self._width)
        self._of_images = [] if encodes else self._images.places
        self._places = [each for each in every if each not in self._of_images]
        self._implicit = shown_places(loaded)
        self._kinds = [each for each, _ in kinds_of(self._places)]
        self._most_heads = max((each.widths.heads for each in self._places), default=0)
        self._image_width = self._width if encodes else int(getattr(vision, "hidden_size", 0))
        self._matrices = 0 if encodes else _matrices(model, [head, *self._images.modules], config)
        self._rows_alone = "logits_to_keep" in loaded.reader.names

    # ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def points_at_once(self, checked: CheckedRequest, steps: int, free_bytes: int) -> int:
        """Return the points of an integrated gradient that are one batch, with so many bytes of memory free."""
        batch, length = checked.inputs.predicted.ids.shape
        keys = max(length, checked.inputs.text.length)
        rows = 1 if self._rows_alone else length
        length = keys if self._loaded.reader.pairs else length
        of_one = self._pass_bytes(batch, length, keys, rows) + self._graph_bytes(batch, length, keys)
        return max(1, min(steps, min(free_bytes // 4, _OF_POINTS) // max(1, of_one)))

    def copies_at_once(self, sizes: "SweepSizes", most: int, free_bytes: int) -> int:
        """Return the copies of texts that one pass of a sweep of edits has, with so many bytes of memory free."""
        one = self.sweep_bytes(sizes, 1)
        of_copy = self.sweep_bytes(sizes, 2) - one
        return max(1, min(most, 1 + (min(free_bytes // 4, _OF_POINTS) - one) // max(1, of_copy)))

    def sweep_bytes(self, sizes: "SweepSizes", copies: int) -> int:
        """Estimate the memory of a sweep of edits, of which each pass has so many copies of the texts."""
        batch, length, positions, keys = sizes.batch, sizes.length, sizes.positions, max(sizes.length, sizes.keys)
        own = keys if self._loaded.reader.pairs else length
        kept = (len(self._places) + 1) * 2 * batch * length * self._width * self._itemsize
        logs = (copies + 1) * batch * positions * self._vocabulary * _LOGS
        tasks = min(_SCORES * 4 * batch * self._most_heads * keys * keys, ROOM)
        return (
            self._pass_bytes(copies * batch, own, keys, positions if self._rows_alone else length) + kept + logs + tasks
        )

    def needed_bytes(self, checked: CheckedRequest, request: ModelInput, points: int = 1) -> int:
        """Estimate the memory of a request besides the model, its reply included.

        points: those of an integrated gradient that are one batch.
        """
        text = checked.inputs.predicted
        batch, length = text.ids.shape
        keys = max([length, checked.inputs.text.length, *[checked.keys(each).length for each in self._kinds]])
        reply_bytes = 0
        answer = max(map(len, checked.inputs.answers)) if checked.inputs.target is None else length
        rows = max(1, answer) if self._rows_alone else length
        if isinstance(request, ModelForwardRequest):
            rows = max(rows, len(request.positions or ()) + answer)
            reply_bytes = sum([count * self._taps(checked, place, request) for place, count in checked.kinds])
            reply_bytes += batch * rows * self._vocabulary * 4 * ("logits" in request.return_)
        elif isinstance(request, ModelWeightsRequest):
            reply_bytes = sum([count * self._weights_bytes(checked, place, request) for place, count in checked.kinds])
        length = keys if self._loaded.reader.pairs else length  # its encoder attends from all keys
        need = self._pass_bytes(points * batch, length, keys, rows) + _COPIES * reply_bytes
        need += self._tile_bytes if isinstance(request, ModelWeightsRequest) else 0
        need += self._loaded.reader.front_bytes(checked.inputs.arguments)
        need += implicit_bytes(self._loaded, checked, request)
        images = checked.inputs.media
        if images is None and self._loaded.reader.absent(checked.inputs) == "text":
            images = checked.inputs.text
        copies = 2 if isinstance(request, ModelGradientsRequest) and request.check else 1
        need += self.image_bytes(images)
        if isinstance(request, ModelGradientsRequest):
            need += max(
                self._graph_bytes(batch, length, keys) * copies, self._graph_bytes(points * batch, length, keys)
            )
            need += len(self._of_images) * self.image_bytes(images) * copies
            need += sum(each.nbytes for each in self._parameters) * 3 if request.check else 0
            need += sum(each.nbytes for each in self._parameters if each.is_meta)  # read from disk, and kept meanwhile
        return need

    @property
    def short_bytes(self) -> int:
        """Estimate the memory of a short run all of whose states are kept."""
        return 2 * len(self._places) * self._pass_bytes(1, TEXT, TEXT, TEXT)

    def graph_bytes(self, texts: int, length: int) -> int:
        """Estimate the memory of a differentiated pass over texts of so many tokens, without a head."""
        return self._pass_bytes(texts, length, length, 0) + self._graph_bytes(texts, length, length)

    def rows_cost(self, texts: int, length: int, rows: int) -> PassCost:
        """The cost of a pass over texts of so many tokens that tells of so many rows of logits of each."""
        rows = rows if self._rows_alone else length
        found = self._cost(texts, length, length, weights=False)
        products = found.flops + 2 * texts * self._head * (rows - 1)
        return PassCost(
            flops=products, bytes=found.bytes, peak_bytes=self._pass_bytes(texts, length, length, rows),
            predicted_ms=found.predicted_ms * products / max(1, found.flops),
        )  # fmt: skip

    def attention_flops(self, length: int) -> int:
        """The matrix products of all attentions over one text."""
        return sum(_attention_flops(place, 1, length, length) for place in self._places)

    def texts_at_once(self, texts: int, length: int, rows: int, free_bytes: int) -> int:
        """Return the texts of so many that are one pass, with so many bytes of memory free."""
        of_one = self.rows_cost(1, length, rows).peak_bytes
        return max(1, min(texts, min(free_bytes // 4, _OF_POINTS) // max(1, of_one)))

    def pair_bytes(self, texts: tuple[int, int], images: tuple[int, int], *, graph: bool) -> int:
        """Estimate the memory of a pass over so many texts and images, of so many tokens each."""
        need = 0
        if all(texts):
            need += self.graph_bytes(*texts) if graph else self._pass_bytes(*texts, texts[1], 0)
        if all(images):
            need += self._vision_bytes(*images) * (len(self._of_images) if graph else 1)
        return need

    def silent_seconds(self, checked: CheckedRequest, passes: int = 1) -> float:
        """Return a bound of the time of so many passes; 0 if they are short."""
        batch, length = checked.inputs.predicted.ids.shape
        length = max(length, checked.inputs.text.length)
        if passes * batch * length <= _SHORT:
            return 0.0
        return self.seconds_of(batch, length, passes)

    def seconds_of(self, texts: int, length: int, passes: int) -> float:
        """Return a bound of the time of so many passes over texts of so many tokens."""
        return passes * _SLOWER * self._cost(texts, length, length, weights=True).predicted_ms / 1e3

    def _pass_bytes(self, batch: int, length: int, keys: int, rows: int) -> int:
        """The memory of a pass that tells of so many rows of logits."""
        states = batch * max(length, keys) * self._itemsize * (_STATES * self._width + _INNER * self._inner)
        logits = batch * rows * self._vocabulary * (self._itemsize + 8)
        scores = batch * self._most_heads * length * keys
        own = own_scores_bytes(self._loaded, batch, max(length, keys) if self._loaded.reader.pairs else length, keys)
        return states + logits + (own or min(_SCORES * 4 * scores, ROOM))

    def image_bytes(self, images: Stack | None) -> int:
        """The memory of one layer that sees images, in a model that reads text too."""
        return 0 if images is None else self._vision_bytes(*images.ids.shape)

    def _vision_bytes(self, batch: int, length: int) -> int:
        scores = max((batch * each.widths.heads * length * length for each in self._of_images), default=0)
        states = batch * length * self._itemsize * (_KEPT_STATES * self._image_width + _INNER * self._inner)
        return int(states + _SCORES * 4 * scores)

    def _graph_bytes(self, batch: int, length: int, keys: int) -> int:
        """The memory of what a backward pass needs of the forward pass."""
        states = batch * max(length, keys) * (_KEPT_STATES * self._width + _INNER * self._inner)
        longest = max(length, keys) if self._loaded.attention.way == "observed" else length
        scores = sum(batch * each.widths.heads * longest * keys for each in self._places)
        return 4 * ((len(self._places) + len(self._loaded.implicit)) * states + _SCORES * scores)

    def _taps(self, checked: CheckedRequest, place: AttentionPlace, request: ModelForwardRequest) -> int:
        """Bytes of the taps of one layer, and of what a recording keeps of it."""
        batch, heads, queries, keys, length = _sizes(checked, place, request)
        width = max(place.widths.head_dim, place.widths.value_dim)
        numbers = 0
        for tap in request.return_:
            if tap in _PAIR_TAPS:
                numbers += batch * heads * queries * keys
            elif tap in {"index_scores", "chosen"}:
                numbers += batch * length * keys
            elif tap in {"hidden", "output"}:
                numbers += batch * length * max(self._width, place.output_width)
            elif tap != "logits":
                numbers += batch * place.widths.heads * max(length, keys) * width
        return 4 * (numbers * (2 if request.compare else 1) + self._recorded(checked, place, keep=request.keep))

    def _weights_bytes(self, checked: CheckedRequest, place: AttentionPlace, request: ModelWeightsRequest) -> int:
        """Bytes of what is told of the weights of one layer."""
        batch, heads, queries, keys, _ = _sizes(checked, place, request)
        numbers = batch * place.widths.heads * _STATISTICS + 2 * batch * heads * queries * min(request.top_k, keys)
        if request.return_weights:
            numbers += batch * (heads + (CHOSEN in place.beside.names)) * queries * keys
        if request.pool is not None:
            numbers += batch * heads * (queries // request.pool + 1) * (keys // request.pool + 1)
        if request.compare:  # the queries, keys and values of the run without edits stay meanwhile, or its weights
            numbers += numbers + batch * (checked.stack(place.queries).length + 2 * keys) * self._width
            if place.taps is not None:
                numbers += batch * place.widths.heads * checked.stack(place.queries).length * keys
        return 4 * (numbers + self._recorded(checked, place, keep=request.keep))

    def _recorded(self, checked: CheckedRequest, place: AttentionPlace, *, keep: bool) -> int:
        """Numbers that a recording keeps of one layer."""
        queries, keys = checked.stack(place.queries).ids.numel(), checked.keys(place).ids.numel()
        return (place.widths.heads * queries * keys + queries * self._width) * keep

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
        images, encodes, reader = self._images.sized(request.images), self._images.encodes, self._loaded.reader
        if encodes and not images:
            raise InvalidRequest.at("images", "this model reads only images; send their sizes")
        if encodes and request.new_tokens:
            raise InvalidRequest.at("new_tokens", "an encoder of images generates nothing")
        shown = max((image.text for image in images), default=0) if encodes else sum(image.text for image in images)
        batch, length = (request.batch * len(images), shown) if encodes else (request.batch, request.length + shown)
        last = length + request.new_tokens

        def fits(batch: int, tokens: int) -> bool:
            return (
                batch * self._cache_bytes(tokens) + self._peak(batch, tokens, images, weights=request.weights)
                <= free_bytes
            )

        prefill = self._cost(batch, length, length, images, weights=request.weights)
        step = self._cost(batch, 1, last + 1, weights=request.weights)
        if encodes:
            step = PassCost(flops=0, bytes=0, peak_bytes=0, predicted_ms=0.0)
        fields: dict[str, Any] = {}
        if images:
            alone = prefill if encodes else self._cost(batch, 0, 0, images, weights=request.weights)
            fields = {"images": image_tokens(images), "vision": alone}
        if request.lens:
            fields["lens"] = self._lens(request.lens, prefill, batch * length)
        if request.fit:
            fields["fit"] = self._fit(request.batch, length)
        limit = shown if encodes else reader.max_length or _FURTHEST
        most = last_that(lambda each: fits(each, last), _FURTHEST)
        return ModelComplexityReply(
            model=self._loaded.name,
            parameters=sum(each.numel() for each in self._parameters),
            parameter_bytes=sum(each.nbytes for each in self._parameters),
            prefill=prefill,
            per_token=step,
            total_ms=prefill.predicted_ms + request.new_tokens * step.predicted_ms,
            cache_bytes_per_token=self._cache_bytes(1),
            cache_bytes=batch * self._cache_bytes(last),
            max_batch=most // len(images) if encodes else most,
            max_length=max(0, last_that(lambda tokens: fits(batch, tokens), limit) - (0 if encodes else shown)),
            **fields,
        )

    def _lens(self, parts: Sequence[LensPart], prefill: PassCost, tokens: int) -> PassCost:
        """The cost of a pass whose states are read at every one of so many tokens."""
        check_predicts_next(self._loaded, "lens")
        wanted = "target" if self._loaded.reader.pairs else "text"
        cost = lens_cost(self._loaded, parts, [each for each in self._places if each.queries == wanted], tokens)
        traffic = cost.traffic
        rates = self._loaded.device.clock.rated(lambda rates: rates.seconds(traffic, self._itemsize))
        return PassCost(
            flops=prefill.flops + traffic.products,
            bytes=prefill.bytes + traffic.read,
            peak_bytes=prefill.peak_bytes + cost.peak_bytes,
            predicted_ms=prefill.predicted_ms + 1e3 * rates.median,
        )

    def jacobian_rows(self, length: int, free_bytes: int) -> int:
        """Return the rows of a Jacobian that are differentiated at once: copies of a text of so many tokens."""
        count = _ROWS
        while count > 1 and self.graph_bytes(count, length) > min(free_bytes // 4, _OF_POINTS):
            count //= 2
        return count

    def _fit(self, texts: int, length: int) -> PassCost:
        """The cost of all rows of the Jacobians of texts: a pass forward and one backward for each."""
        check_predicts_next(self._loaded, "fit")
        rows = min(self._width, self.jacobian_rows(length, self._loaded.device.free_bytes()))
        once, passes = self._cost(rows, length, length, weights=False), 3 * texts * -(-self._width // rows)
        return PassCost(
            flops=passes * once.flops,
            bytes=passes * once.bytes,
            peak_bytes=self.graph_bytes(rows, length) + 12 * len(self._places) * self._width**2,
            predicted_ms=passes * once.predicted_ms,
        )

    def _cost(
        self, batch: int, tokens: int, keys: int, images: Sequence[SizedImage] = (), *, weights: bool
    ) -> PassCost:
        """The cost of a pass over new tokens, after ``keys`` − ``tokens`` others, and over images, if any come."""
        encodes, itemsize = self._images.encodes, self._itemsize
        times = self._times(batch, images)
        products = times * self._images.products(images)
        layers, parameters, cached, states = 0, self._images.parameter_bytes if images else 0, 0, 0
        if images:
            crops, length = self._images.shape(images)
            layers = len(self._images.places)
            states = layers * times * crops * length * (_STATES * self._image_width + _INNER * self._inner)
        adapter = self._loaded.adapters.active
        if adapter is not None:
            products += 2 * adapter.numbers * batch * max(tokens, 1)
            parameters += adapter.files.bytes
        if tokens and not encodes:
            products += batch * (2 * self._matrices * tokens + 2 * self._head)
            products += sum(_attention_flops(place, batch, tokens, keys) for place in self._places)
            products += implicit_flops(self._implicit, batch, tokens) if weights else 0
            layers += len(self._places)
            parameters += sum(each.nbytes for each in self._parameters) - self._images.parameter_bytes
            cached = batch * self._cache_bytes(keys)
            states += len(self._places) * batch * tokens * (_STATES * self._width + _INNER * self._inner)
        states *= itemsize
        half = products if itemsize == 2 else 0
        traffic = Traffic(
            parameters + cached + states, states, operations=20 * layers, products=products, half_products=half
        )
        rates = self._loaded.device.clock.rated(lambda rates: rates.seconds(traffic, itemsize))
        peak = self._peak(batch, tokens, images, keys, weights=weights)
        return PassCost(flops=products, bytes=parameters + cached, peak_bytes=peak, predicted_ms=1e3 * rates.median)

    def _peak(
        self, batch: int, tokens: int, images: Sequence[SizedImage], keys: int | None = None, *, weights: bool
    ) -> int:
        """The memory of a pass, or of decoding its images if that takes more."""
        keys = tokens if keys is None else keys
        numbers = sum(batch * each.widths.heads * (tokens * keys + _STATISTICS) for each in self._places)
        need = self._pass_bytes(batch, tokens, keys, 1 if self._rows_alone else tokens) if tokens else 0
        if images and not self._images.encodes:
            crops, length = self._images.shape(images)
            need += batch * self._vision_bytes(crops, length)
            numbers += sum(batch * crops * each.widths.heads * (length**2 + _STATISTICS) for each in self._of_images)
        if weights:
            numbers += sum(batch * each.widths.heads * tokens * tokens for each in self._implicit)
            need += self._tile_bytes + 4 * _COPIES * numbers
            need += max(matrix_bytes(self._implicit, batch, tokens, self._itemsize), default=0)
        return max(need, self._times(batch, images) * sum(image.decoding for image in images))

    def _times(self, batch: int, images: Sequence[SizedImage]) -> int:
        """The times that all images are read in so large a batch: of texts, or of images of an encoder."""
        return -(-batch // len(images)) if self._images.encodes and images else batch

    def _cache_bytes(self, tokens: int) -> int:
        """Keys and values of so many tokens, in every layer whose keys are its own tokens."""
        own = [each for each in self._places if each.keys in {each.queries, BOTH} and not self._images.encodes]
        return self._itemsize * sum(each.cached_numbers(tokens) for each in own)


def _weights(model: nn.Module, without: Collection[nn.Module | None]) -> list[Tensor]:
    """The matrices by which a model multiplies its states."""
    left_out = {id(each) for each in without}
    modules = [each for each in model.modules() if id(each) not in left_out]
    return [each.weight for each in modules if isinstance(each, nn.Linear | Conv1D)]


def _matrices(model: nn.Module, without: Collection[nn.Module | None], config: Any) -> int:
    """The numbers that each token is multiplied by: of experts, of those that a token visits."""
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1
    visited = getattr(config, "num_experts_per_tok", None) or experts
    stacked = sum(each.numel() for each in model.parameters() if each.ndim == 3 and len(each) > 1)
    single = sum(each.numel() for each in _weights(model, without))
    return single + stacked * int(visited) // int(experts)


def _attention_flops(place: AttentionPlace, batch: int, tokens: int, keys: int) -> int:
    """The matrix products of one attention over the pairs that its masks allow, and of what is cached before."""
    if tokens == keys:
        return flops(place.bound(batch, tokens, keys), masked=True).matmul
    widths, keys = place.widths, keys if place.reach is None else min(keys, place.reach)
    pairs = widths.heads * tokens * keys
    return batch * (2 * pairs * (widths.head_dim + widths.value_dim) + place.expansion_flops(keys - tokens))


def _sizes(checked: CheckedRequest, place: AttentionPlace, request: Any) -> tuple[int, int, int, int, int]:
    """B, selected heads and queries, keys and L of one layer."""
    stack, keys = checked.stack(place.queries), checked.keys(place).length
    batch, length = stack.ids.shape
    heads, queries = place.widths.heads, length
    if request.select is not None:
        heads = heads if request.select.heads is None else len(request.select.heads)
        queries = queries if request.select.queries is None else len(request.select.queries)
    return batch, heads, queries, keys, length
