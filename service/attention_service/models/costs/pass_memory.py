"""The memory of passes of a whole model.

Notation: B texts, L tokens, H heads, V the size of the vocabulary.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest, ModelWeightsRequest
from attention_contract.schemas.prompts import ModelInput
from attention_contract.schemas.text_positions import position_count
from attention_service.core.inspection.statistics import PAIRS, RECEIVED
from attention_service.models.costs.implicit_costs import implicit_bytes, matrix_bytes, state_bytes
from attention_service.models.costs.model_sizes import ModelSizes
from attention_service.models.inputs.input_stacks import SizedImage, Stack
from attention_service.models.loaded.checked_request import CheckedRequest
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.attention_places import BOTH, TEXT, AttentionPlace
from attention_service.models.passes.layer_attention import KERNEL_BYTES
from attention_service.models.passes.module_taps import CHOSEN
from attention_service.runtime.binding.bound_pairs import most_pairs

STATES_OF_CACHED_PASS: Final = 24
"""Tensors as wide as the hidden states, of every token read, that a layer has at once in a pass that caches."""
_SCORES: Final = 4
"""Matrices of scores and weights that a layer holds at once, or that the graph keeps of it."""
_OWN_SCORES: Final = 6
"""The same of a layer whose model computes them itself, all at once, with the copies of what is asked of them."""
_STATISTICS: Final = 16
"""Numbers that are told of each head, or of each of its queries."""
_REPLY_COPIES: Final = 2
"""Times that a reply is in memory, if it goes through the pipe: in the model's process and in the server's."""
_OF_POINTS: Final = 2**29
"""Bytes that texts, or points of an integrated gradient, which are one batch may take; more would hardly be faster."""
_PART_TOKENS: Final = {"cpu": 2048, "cuda": 32_768}
"""Tokens of the copies of a text that are one part of a question, by device; of more it would hardly be faster."""
_PART_FLOPS: Final = {"cpu": 2 * 10**10, "cuda": 10**13}
"""Operations of such a part, which take some tenths of a second: then others have their turns."""
_ANSWER_WEIGHTS: Final = 4
"""Copies of the weights of the queries that predict an answer that one layer holds at once."""
_LOGS: Final = 4 * 8
"""Bytes for each logit of a prediction that is compared with another in float64."""
_ROWS: Final = 64
"""The most rows of a Jacobian that are differentiated at once."""
_CORRECTED: Final = 5
"""Copies of the weights of a layer that their correction holds at once."""
_BIASES: Final = 2
"""Copies of the biases of all heads, alone and with the padding, that a pass holds."""
_BUCKETS: Final = 32
"""Bytes for each query and key by which its biases are looked up, beside one copy of them."""
_PAIR_TAPS: Final = frozenset({"scores", "capped_scores", "masked_scores", "weights"})


def own_scores_bytes(loaded: LoadedModel, batch: int, queries: int, keys: int) -> int:
    """The memory of the scores and weights of one layer, if the model computes them itself; else 0."""
    if loaded.attention.way == "computed":
        return 0
    return _OWN_SCORES * 4 * batch * _most(loaded.places.values(), queries, keys)


def bias_bytes(loaded: LoadedModel, batch: int, queries: int, keys: int) -> int:
    """The memory of the biases that the model makes for each head, query and key; 0 for a model without."""
    biased = [place for place in loaded.places.values() if place.biased]
    if not biased:
        return 0
    of_all = loaded.model.dtype.itemsize * _most(biased, queries, keys)
    return max(_BIASES * batch * of_all, _BUCKETS * max(_pairs(place, queries, keys) for place in biased) + of_all)


def _scores(place: AttentionPlace, queries: int, keys: int) -> int:
    """The scores of an attention over one text of so many tokens, or over one image."""
    return place.widths.heads * _pairs(place, queries, keys)


def _pairs(place: AttentionPlace, queries: int, keys: int) -> int:
    """The pairs of a query and a key of an attention over one text of so many tokens, or over one image."""
    return queries * keys if place.windows is None else place.windows.pairs


def _most(places: Iterable[AttentionPlace], queries: int, keys: int) -> int:
    """The scores of the largest of these attentions; 0 without any."""
    return max([_scores(place, queries, keys) for place in places], default=0)


class SweepSizes(NamedTuple):
    """The sizes of the texts of a sweep of edits."""

    batch: int
    length: int
    keys: int
    """Tokens of the text that the keys are of."""
    positions: int = 1
    """Positions of each text whose predictions are measured."""
    kept: int = 0
    """Numbers that are kept of each token beside its states: those of all runs but the copies."""
    of_copy: int = 0
    """Numbers of each token of a copy beside those of a pass."""
    beside_bytes: int = 0
    """Memory beside the passes: of images, of sounds and of implicit weights."""


class PassMemory:
    """The memory of passes of one model."""

    def __init__(self, loaded: LoadedModel, sizes: ModelSizes) -> None:
        self._loaded, self._sizes = loaded, sizes

    def rows_bytes(self, texts: int, length: int, rows: int) -> int:
        """Estimate the peak memory of a forward pass that returns logits at ``rows`` positions per text."""
        return self._pass_bytes(texts, length, length, rows if self._sizes.rows_alone else length)

    def points_at_once(self, checked: CheckedRequest, steps: int, free_bytes: int) -> int:
        """Return how many points of an integrated gradient fit into one batch."""
        batch, length = checked.inputs.predicted.ids.shape
        keys = max(length, checked.inputs.text.length)
        rows = 1 if self._sizes.rows_alone else length
        length = keys if self._loaded.reader.pairs else length
        of_one = self._pass_bytes(batch, length, keys, rows) + self._graph_bytes(batch, length, keys)
        return max(1, min(steps, self.in_part(batch * keys, 3), min(free_bytes // 4, _OF_POINTS) // max(1, of_one)))

    def in_part(self, tokens: int, times: int = 1) -> int:
        """Return the copies of a text of so many tokens that are one part of a question; each is run ``times`` times.

        The numbers of a reply depend on it, so it depends on nothing that is measured.
        """
        device = "cuda" if self._loaded.device.is_cuda else "cpu"
        tokens = max(1, times * tokens)
        operations = 2 * tokens * max(1, self._sizes.matrices + self._sizes.head)
        return max(1, min(_PART_TOKENS[device] // tokens, _PART_FLOPS[device] // operations))

    def copies_at_once(self, sizes: "SweepSizes", most: int, free_bytes: int) -> int:
        """Return the copies of texts that one pass of a sweep of edits has, with so many bytes of memory free."""
        one = self.sweep_bytes(sizes, 1)
        of_copy = self.sweep_bytes(sizes, 2) - one
        most = min(most, self.in_part(sizes.batch * max(sizes.length, sizes.keys)))
        return max(1, min(most, 1 + (min(free_bytes // 4, _OF_POINTS) - one) // max(1, of_copy)))

    def sweep_bytes(self, sizes: "SweepSizes", copies: int) -> int:
        """Estimate the memory of a sweep of edits, of which each pass has so many copies of the texts."""
        batch, length, positions, keys = sizes.batch, sizes.length, sizes.positions, max(sizes.length, sizes.keys)
        own = keys if self._loaded.reader.pairs else length
        kept = (self._sizes.layers + 1) * 2 * batch * length * self._sizes.width * self._sizes.itemsize
        kept += batch * length * 4 * (sizes.kept + copies * sizes.of_copy)
        logs = (copies + 1) * batch * positions * self._sizes.vocabulary * _LOGS
        tasks = min(_SCORES * 4 * batch * self._sizes.most_heads * keys * keys, KERNEL_BYTES)
        rows = positions if self._sizes.rows_alone else length
        return self._pass_bytes(copies * batch, own, keys, rows) + kept + logs + tasks + sizes.beside_bytes

    def needed_bytes(self, checked: CheckedRequest, request: ModelInput, points: int = 1) -> int:
        """Estimate the memory of a request besides the model, its reply included.

        points: those of an integrated gradient that are one batch.
        """
        text = checked.inputs.predicted
        batch, length = text.ids.shape
        keys = max([length, checked.inputs.text.length, *[checked.keys(kind).length for kind in self._sizes.kinds]])
        reply_bytes = 0
        answer = max(map(len, checked.inputs.answers)) if checked.inputs.target is None else length
        rows = max(1, answer) if self._sizes.rows_alone else length
        if isinstance(request, ModelForwardRequest):
            by_text = batch if request.positions and isinstance(request.positions[0], list) else 1
            rows = max(rows, min(length, by_text * position_count(request.positions)) + answer)
            reply_bytes = sum([count * self._taps(checked, place, request) for place, count in checked.kinds])
            reply_bytes += batch * rows * self._sizes.vocabulary * 4 * ("logits" in request.return_)
            reply_bytes += batch * length * self._sizes.width * 4 * ("embeddings" in request.return_)
        elif isinstance(request, ModelWeightsRequest):
            reply_bytes = sum([count * self._weights_bytes(checked, place, request) for place, count in checked.kinds])
        length = keys if self._loaded.reader.pairs else length  # its encoder attends from all keys
        need = self._pass_bytes(points * batch, length, keys, rows) + _REPLY_COPIES * reply_bytes
        if isinstance(request, ModelWeightsRequest):
            need += self._sizes.tile_bytes
            need += max([self._matrix_bytes(checked, place, request) for place, _ in checked.kinds], default=0)
        need += self.beside_bytes(checked, request)
        if isinstance(request, ModelGradientsRequest):
            images, copies = self._images(checked), 2 if request.check else 1
            need += max(
                self._graph_bytes(batch, length, keys) * copies, self._graph_bytes(points * batch, length, keys)
            )
            need += len(self._sizes.of_images) * self.image_bytes(images) * copies
            need += self._sizes.parameter_bytes * 3 if request.check else 0
            on_disk = [parameter for parameter in self._sizes.parameters if parameter.is_meta]
            need += sum(parameter.nbytes for parameter in on_disk)  # read, and kept meanwhile
        return need

    def beside_bytes(self, checked: CheckedRequest, request: ModelInput) -> int:
        """Estimate the memory beside the texts of a request: of images, of sounds and of implicit weights."""
        need = self._loaded.reader.front_bytes(checked.inputs.arguments) + self.image_bytes(self._images(checked))
        return need + (implicit_bytes(self._loaded, checked, request) if self._loaded.implicit else 0)

    def images_of(self, checked: CheckedRequest) -> list[SizedImage]:
        """The images of one text of a request, or one of those of an encoder. The layers that hear are not counted."""
        if self._loaded.reader.media == "audio":
            return []
        stack = checked.inputs.text if self._sizes.images.encodes else self._images(checked)
        if stack is None:
            return []
        crops, length = (1, stack.length) if self._sizes.images.encodes else stack.ids.shape
        return [SizedImage(length, crops, length)]

    def _images(self, checked: CheckedRequest) -> Stack | None:
        """The tokens of the layers that see images, of a model that reads text too."""
        inputs = checked.inputs
        alone = inputs.media is None and self._loaded.reader.absent(inputs) == "text"
        return inputs.text if alone else inputs.media

    @property
    def short_bytes(self) -> int:
        """Estimate the memory of a short run all of whose states are kept."""
        return 2 * self._sizes.layers * self._pass_bytes(1, TEXT, TEXT, TEXT)

    def graph_bytes(self, texts: int, length: int) -> int:
        """Estimate the memory of a differentiated pass over texts of so many tokens, without a head."""
        return self._pass_bytes(texts, length, length, 0) + self._graph_bytes(texts, length, length)

    def jacobian_bytes(self, rows: int, length: int) -> int:
        """Estimate the memory of so many rows of the Jacobians of a text: the gradients of as many copies of it."""
        return self.graph_bytes(rows, length) + 8 * self._sizes.layers * rows * self._sizes.width

    def answer_weights_bytes(self, answer: int, length: int) -> int:
        """Estimate the memory of the weights of the queries that predict an answer, in one layer."""
        return _ANSWER_WEIGHTS * 4 * self._sizes.most_heads * answer * length

    def texts_at_once(self, texts: int, length: int, rows: int, free_bytes: int) -> int:
        """Return how many texts fit into one pass."""
        of_one = self.rows_bytes(1, length, rows)
        return max(1, min(texts, self.in_part(length), min(free_bytes // 4, _OF_POINTS) // max(1, of_one)))

    def jacobian_rows(self, length: int, free_bytes: int) -> int:
        """Return the rows of a Jacobian that are differentiated at once: copies of a text of so many tokens."""
        count = min(_ROWS, self.in_part(length, 3))
        while count > 1 and self.graph_bytes(count, length) > min(free_bytes // 4, _OF_POINTS):
            count //= 2
        return count

    def pair_bytes(self, texts: tuple[int, int], images: tuple[int, int], *, graph: bool) -> int:
        """Estimate the memory of a pass over so many texts and images, of so many tokens each."""
        need = 0
        if all(texts):
            need += self.graph_bytes(*texts) if graph else self._pass_bytes(*texts, texts[1], 0)
        if all(images):
            need += self._vision_bytes(*images) * (len(self._sizes.of_images) if graph else 1)
        return need

    def peak(
        self, batch: int, tokens: int, images: Sequence[SizedImage], keys: int | None = None, *, weights: bool
    ) -> int:
        """The memory of a pass, or of decoding its images if that takes more."""
        keys = tokens if keys is None else keys
        numbers = sum([batch * place.widths.heads * (tokens * keys + _STATISTICS) for place in self._sizes.places])
        need = self._pass_bytes(batch, tokens, keys, 1 if self._sizes.rows_alone else tokens) if tokens else 0
        if images and not self._sizes.images.encodes:
            crops, length = self._sizes.images.shape(images)
            need += self.sized_bytes(batch, images)
            numbers += sum(
                batch * crops * place.widths.heads * (length**2 + _STATISTICS) for place in self._sizes.of_images
            )
        if weights:
            numbers += sum(
                batch * place.widths.heads * (tokens * tokens + _STATISTICS) for place in self._sizes.implicit
            )
            need += self._sizes.tile_bytes + 4 * _REPLY_COPIES * numbers
            need += max(matrix_bytes(self._sizes.implicit, batch, tokens, self._sizes.itemsize), default=0)
        return max(need, self.times(batch, images) * sum(image.decoding for image in images))

    def times(self, batch: int, images: Sequence[SizedImage]) -> int:
        """The times that all images are read in so large a batch: of texts, or of images of an encoder."""
        return -(-batch // len(images)) if self._sizes.images.encodes and images else batch

    def cache_bytes(self, tokens: int) -> int:
        """Keys and values of so many tokens, in every layer whose keys are its own tokens, and running states."""
        if self._sizes.images.encodes:
            return 0
        own = [place for place in self._sizes.places if place.keys in {place.queries, BOTH}]
        states = state_bytes(self._loaded) if self._loaded.implicit else 0
        return self._sizes.itemsize * sum([place.cached_numbers(tokens) for place in own]) + states

    def _pass_bytes(self, batch: int, length: int, keys: int, rows: int) -> int:
        """The memory of a pass that tells of so many rows of logits."""
        states = batch * max(length, keys) * self._sizes.itemsize * self._sizes.layer_numbers
        logits = batch * rows * self._sizes.vocabulary * (self._sizes.itemsize + 8)
        scores = batch * _most(self._sizes.kinds, length, keys)
        own = own_scores_bytes(self._loaded, batch, max(length, keys) if self._loaded.reader.pairs else length, keys)
        biases = bias_bytes(self._loaded, batch, max(length, keys), keys)
        return states + logits + biases + (own or min(_SCORES * 4 * scores, KERNEL_BYTES))

    def image_bytes(self, images: Stack | None) -> int:
        """The memory of one layer that sees images, in a model that reads text too."""
        return 0 if images is None else self._vision_bytes(*images.ids.shape)

    def sized_bytes(self, texts: int, images: Sequence[SizedImage]) -> int:
        """The memory of images of these sizes in so many texts, as of ``image_bytes``."""
        if not images or self._sizes.images.encodes:
            return 0
        return texts * self._vision_bytes(*self._sizes.images.shape(images))

    def _vision_bytes(self, batch: int, length: int) -> int:
        scores = max((batch * place.widths.heads * length * length for place in self._sizes.of_images), default=0)
        states = batch * length * self._sizes.itemsize * self._sizes.kept_image_numbers
        return int(states + _SCORES * 4 * scores)

    def _graph_bytes(self, batch: int, length: int, keys: int) -> int:
        """The memory of what a backward pass needs of the forward pass."""
        states = batch * max(length, keys) * self._sizes.kept_numbers
        longest = max(length, keys) if self._loaded.attention.way == "observed" else length
        scores = sum(batch * _scores(place, longest, keys) for place in self._sizes.places)
        return 4 * (self._sizes.layers * states + _SCORES * scores)

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
            elif tap in {"hidden", "mlp", "output"}:
                numbers += batch * length * max(self._sizes.width, place.output_width)
            elif tap == "router":
                numbers += batch * length * (self._loaded.runner.width((place.key, tap)) or 0)
            elif tap not in {"logits", "embeddings"}:
                numbers += batch * place.widths.heads * max(length, keys) * width
        return 4 * (numbers * (2 if request.compare else 1) + self._recorded(checked, place, keep=request.keep))

    def _weights_bytes(self, checked: CheckedRequest, place: AttentionPlace, request: ModelWeightsRequest) -> int:
        """Bytes of what is told of the weights of one layer."""
        batch, heads, queries, keys, _ = _sizes(checked, place, request)
        numbers = batch * place.widths.heads * _STATISTICS + 2 * batch * heads * queries * min(request.top_k, keys)
        if request.return_weights:
            numbers += batch * (heads + (CHOSEN in place.beside.names)) * queries * keys
        if RECEIVED in (request.statistics or ()):
            numbers += batch * place.widths.heads * keys
        if request.pool is not None:
            numbers += batch * heads * (queries // request.pool + 1) * (keys // request.pool + 1)
        if request.compare:  # the queries, keys and values of the run without edits stay meanwhile, or its weights
            numbers += numbers + batch * (checked.queries(place).length + 2 * keys) * self._sizes.width
            if place.taps is not None:
                numbers += batch * place.widths.heads * checked.queries(place).length * keys
        return 4 * (numbers + self._recorded(checked, place, keep=request.keep))

    def _matrix_bytes(self, checked: CheckedRequest, place: AttentionPlace, request: ModelWeightsRequest) -> int:
        """Bytes of the matrices that one layer holds while its statistics are computed, besides a tile of weights."""
        batch, _, _, keys, length = _sizes(checked, place, request)
        rows = 0
        if request.normalize == "apc":
            rows += _CORRECTED * length * (2 if request.compare else 1)
        if PAIRS in (request.statistics or ()):
            rows += min(length, most_pairs(request.statistic_options.pairs)) + 1
        return 4 * batch * place.widths.heads * rows * keys

    def _recorded(self, checked: CheckedRequest, place: AttentionPlace, *, keep: bool) -> int:
        """Numbers that a recording keeps of one layer."""
        if not keep:
            return 0
        queries, keys = checked.queries(place).ids.numel(), checked.keys(place).ids.numel()
        return place.widths.heads * queries * keys + queries * self._sizes.width


def _sizes(checked: CheckedRequest, place: AttentionPlace, request: Any) -> tuple[int, int, int, int, int]:
    """B, selected heads and queries, keys and L of one layer."""
    stack, keys = checked.queries(place), checked.keys(place).length
    batch, length = stack.ids.shape
    heads, queries = place.widths.heads, length
    if request.select is not None:
        heads = heads if request.select.heads is None else len(request.select.heads)
        queries = queries if request.select.queries is None else len(request.select.queries)
    return batch, heads, queries, keys, length
