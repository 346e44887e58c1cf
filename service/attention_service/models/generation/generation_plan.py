"""The plan of a generation: its prompts, settings, layers and edits, checked, with the memory that it takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

from torch import Tensor

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.attention import Edit
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_contract.schemas.openai import AttentionOfTokens, ChatCompletionRequest, CompletionRequest
from attention_contract.schemas.openai_api.responses import ResponseRequest
from attention_contract.schemas.openai_api.transcriptions import TranscriptionRequest
from attention_contract.schemas.prompts import ImageBytes, images_in, sounds_in
from attention_service.core.inspection.statistics import CLASS_SHARES, DEFAULT_STATISTICS
from attention_service.models.costs.implicit_costs import state_bytes
from attention_service.models.costs.pass_memory import STATES_OF_CACHED_PASS, own_scores_bytes
from attention_service.models.generation.joined.text_slabs import ROWS_OF_TEXTS, slab_places
from attention_service.models.generation.sampling import CHAT_TOKENS, Sampling, TextRequest
from attention_service.models.inputs.conversations import ChatForm, messages_of
from attention_service.models.inputs.input_stacks import Inputs, Seconds, Stack
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.attention_places import BOTH, AttentionPlace
from attention_service.models.passes.module_taps import MODULE_TAPS
from attention_service.runtime.binding.bound_statistics import check_able, check_single_query, check_sink_mass
from attention_service.runtime.binding.selection import check_indices
from attention_transformers.model_layers import LayerKey

_LOGITS: Final = 8
"""Tensors as wide as the vocabulary, of each choice, that the drawing of a token has at once."""
_REPORTED: Final = 64
"""Bytes of each number that is told of a token: as float64 while it is computed, and as text."""
_KEPT: Final = 8
"""Bytes of each number of a recording: as float32, and once more as it is sent."""
GenerationRequest = ChatCompletionRequest | CompletionRequest | ResponseRequest | TranscriptionRequest

_OF_WHOLE_TEXTS: Final = (
    "which are those of a whole text, and are not made token by token; leave attention out, and ask for the weights of "
    "the text (/v1/models/{model}/weights)"
)
"""The reason for which implicit weights are not told while tokens are generated."""


@dataclass(frozen=True)
class Heard:
    """The sound that a text is written down from."""

    settings: Mapping[str, Any]
    """Arguments of ``generate`` for its language and prompt."""
    heads: Mapping[LayerKey, Sequence[int]]
    """The alignment heads of each layer that has some."""
    seconds: Sequence[Seconds]
    """The part of the sound that each key of these layers is; None of a key that is a word of the prompt."""
    median_width: int
    language: str | None = None
    """The language that the prompt names, in English."""


@dataclass(frozen=True)
class GenerationPlan:
    """A request to generate, checked."""

    rows: list[list[int]]
    """The tokens of each prompt."""
    padding: int
    ends: frozenset[int]
    """The tokens that end a choice."""
    sampling: "Sampling"
    look: AttentionOfTokens | None
    """The request to tell of each token; None for nothing to tell."""
    places: Sequence[AttentionPlace]
    """The layers to tell of."""
    edits: Mapping[LayerKey, Sequence[Edit]]

    alone: bool = False
    """True if its texts share no pass."""
    keeps: bool = False
    """True if the run is kept as a recording."""
    images: Sequence[ImageBytes] = ()
    arguments: Mapping[str, Tensor] = field(default_factory=dict)
    """Arguments of the model besides the tokens, of a prompt with images."""
    vision: Stack | None = None
    """The tokens of the layers that see these images."""
    heard: Heard | None = None
    """The sound, whose frames are then the prompt, or parts of it."""
    echoes: bool = False
    """True if each choice begins with its prompt."""

    @property
    def longest(self) -> int:
        """The tokens of the longest prompt."""
        return max(map(len, self.rows))

    @property
    def longest_pass(self) -> int:
        """The most tokens that one pass may be over: those of a prompt, or of the text that is kept."""
        return self.longest + (self.sampling.new_tokens if self.keeps else 0)

    @property
    def choices(self) -> int:
        """The number of sequences that are generated."""
        return len(self.rows) * self.sampling.choices

    def needed_bytes(self, loaded: LoadedModel) -> int:
        """Estimate the memory that it takes besides the model."""
        config = loaded.model.config.get_text_config()
        width = loaded.model.dtype.itemsize
        largest = max((each.widths.kv_heads * each.widths.head_dim for each in loaded.places.values()), default=0)
        longer = 4 * (self.longest + self.sampling.new_tokens) * largest  # a longer copy of one layer's is made
        cache = self.cache_bytes(loaded) + self.choices * width * longer
        states = self.choices * self.longest * config.hidden_size * STATES_OF_CACHED_PASS * width
        logits = self.choices * config.vocab_size * 4 * _LOGITS
        length = max(map(len, self.rows))
        states += own_scores_bytes(loaded, 1, length, length)
        if self.echoes and self.sampling.logprobs is not None:  # of one prompt at a time
            logits += self.longest * config.vocab_size * (4 + loaded.model.dtype.itemsize)
        return int(cache + states + logits + _REPORTED * self.reported_numbers() + _KEPT * self.kept_numbers(loaded))

    def cache_bytes(self, loaded: LoadedModel) -> int:
        """Estimate the memory of keys, values and states; texts that share passes hold more places than tokens."""
        length, places = self.longest + self.sampling.new_tokens, loaded.places.values()
        numbers = sum(each.cached_numbers(length) for each in places)
        if not (self.alone or loaded.reader.pairs):
            every = sum(each.token_numbers for each in places if each.queries != "media")
            numbers = max(numbers, int(ROWS_OF_TEXTS * slab_places(length) * every))
        return self.choices * (loaded.model.dtype.itemsize * numbers + state_bytes(loaded))

    def kept_numbers(self, loaded: LoadedModel) -> int:
        """The numbers of the recording, if the run is kept."""
        if not self.keeps:
            return 0
        width = int(loaded.model.config.get_text_config().hidden_size)
        images = 0 if self.vision is None else self.vision.ids.numel()
        found = 0
        for place in loaded.places.values():
            length = images if place.queries == "media" else self.longest + self.sampling.new_tokens
            found += length * (place.widths.heads * length + width)
        return found

    def reported_numbers(self) -> int:
        """The numbers that are told of all tokens."""
        if (look := self.look) is None:
            return 0
        heads = sum(each.widths.heads if look.heads is None else len(look.heads) for each in self.places)
        tokens, length = self.sampling.new_tokens, self.longest + self.sampling.new_tokens
        names = len(DEFAULT_STATISTICS if look.statistics is None else look.statistics)
        names += len(look.statistic_options.token_classes)
        numbers = names + 2 * min(look.top_k, length) + (length if look.weights else 0)
        return self.choices * tokens * heads * numbers


def plan_generation(loaded: LoadedModel, request: TextRequest) -> GenerationPlan:
    """Check a request. Raises InvalidRequest that names the field at fault."""
    model, reader = loaded.model, loaded.reader
    if not model.can_generate():
        why = loaded.without_head if loaded.head.predicts is None else f"{type(model).__name__} does not generate"
        raise InvalidRequest.at("model", f"{why}; take a causal language model")
    images: list[ImageBytes] = []
    more: dict[str, Any] = {}
    if isinstance(request, ChatCompletionRequest) and (
        (images := images_in(request.messages)) or sounds_in(request.messages)
    ):
        inputs = _read_with_media(loaded, request)
        rows = [inputs.text.host_ids[0].tolist()]
        own = {name: x for name, x in inputs.arguments.items() if name not in {"input_ids", "attention_mask"}}
        more = {"images": images, "arguments": own, "vision": inputs.media}
    else:
        rows = _prompts(loaded, request)
    longest = 1 if reader.pairs else max(map(len, rows))
    most_tokens = CHAT_TOKENS if reader.max_length is None else reader.max_length - longest
    limit = "" if reader.max_length is None else f"the model's maximum context length is {reader.max_length} tokens"
    sampling = Sampling.of(request, most_tokens, model.generation_config, _forced(loaded, request))
    if sampling.least_tokens > sampling.new_tokens:
        raise InvalidRequest.at("min_tokens", f"expected at most max_tokens, {sampling.new_tokens}")
    if (most_tokens < 1 and sampling.new_tokens) or (limit and sampling.new_tokens > most_tokens):
        field = "max_tokens" if most_tokens > 0 else "prompt" if isinstance(request, CompletionRequest) else "messages"
        raise InvalidRequest.at(
            field,
            f"{limit}; the prompt has {longest}, and {sampling.new_tokens} are to follow",
            limit=reader.max_length,
        )
    known, changes = reader.predictable, sampling.changes
    if changes is not None and (beyond := [each for each in changes.bias if each >= known]):
        raise InvalidRequest.at("logit_bias", f"token {beyond[0]} is out of range; there are {known}")
    for index, token in enumerate(request.stop_token_ids or ()):
        if token >= known:
            raise InvalidRequest.at(f"stop_token_ids.{index}", f"token {token} is out of range; there are {known}")
    more["echoes"] = _echo(loaded, request)
    return looking_plan(loaded, request.attention, rows, sampling, alone=bool(request.alone), **more)


def looking_plan(
    loaded: LoadedModel, wanted: AttentionOfTokens | None, rows: list[list[int]], sampling: "Sampling", **more: Any
) -> GenerationPlan:
    """The plan of these prompts, with the attention that is asked of each token. ``more``: further fields of it.

    Raises InvalidRequest.
    """
    settings, reader = loaded.model.generation_config, loaded.reader
    ends = frozenset(each for each in reader.end_ids(loaded.model) if 0 <= each < reader.predictable)
    padding = next((each for each in (settings.pad_token_id, *sorted(ends)) if reader.knows(each)), 0)
    ends = (frozenset() if sampling.ignores_end else ends) | sampling.stop_ids
    if wanted is None:
        return GenerationPlan(rows, padding, ends, sampling, None, (), {}, **more)
    places = _places(loaded, wanted)
    edits = _edits(loaded, wanted, rows, sampling)
    if (
        more.get("echoes")
        and sampling.logprobs is not None
        and any(_is_placed(edit) for own in edits.values() for edit in own)
    ):
        raise InvalidRequest.at("echo", "edits of some queries or keys, or with a value, go without echo and logprobs")
    if wanted.keep and (len(rows) > 1 or sampling.choices > 1):
        raise InvalidRequest.at("attention.keep", "a recording is of one choice of one prompt")
    look = wanted if wanted.statistics != [] or wanted.top_k or wanted.weights else None
    if not loaded.places and (look or wanted.keep):
        raise InvalidRequest.at("attention", f"{loaded.without_attention}, {_OF_WHOLE_TEXTS}")
    return GenerationPlan(rows, padding, ends, sampling, look, places, edits, keeps=wanted.keep, **more)


def _prompts(loaded: LoadedModel, request: TextRequest) -> list[list[int]]:
    reader = loaded.reader
    if reader.tokenizer is None:
        field = "messages" if isinstance(request, ChatCompletionRequest) else "prompt"
        raise InvalidRequest.at(field, f"{reader.no_tokenizer}, so its tokens have no text")
    if isinstance(request, ChatCompletionRequest):
        ids = reader.tokens(
            reader.conversation(messages_of(request.messages), ChatForm.of(request)).text, "messages", special=False
        ).ids
        reader.check(ids, "messages")
        return [ids]
    return _prompt_tokens(loaded, request.prompt, "prompt")


def _forced(loaded: LoadedModel, request: TextRequest) -> int | None:
    """The token that the decoder of an encoder-decoder is to begin with. Raises InvalidRequest."""
    if request.forced_bos_token_id is None:
        return None
    if not loaded.reader.pairs:
        raise InvalidRequest.at(
            "forced_bos_token_id",
            "it is the first token of an encoder-decoder's answer; this model continues its prompt",
        )
    return loaded.reader.token_id(request.forced_bos_token_id, "forced_bos_token_id")


def _echo(loaded: LoadedModel, request: TextRequest) -> bool:
    """True if each choice begins with its prompt. Raises InvalidRequest."""
    echoes = isinstance(request, CompletionRequest) and bool(request.echo)
    if echoes and loaded.reader.pairs:
        raise InvalidRequest.at(
            "echo", "the prompt of an encoder-decoder is no beginning of its answer; leave echo out"
        )
    return echoes


def _read_with_media(loaded: LoadedModel, request: ChatCompletionRequest) -> Inputs:
    """Read a conversation with images or sounds. Raises InvalidRequest."""
    try:
        form = ChatForm.of(request)
        return loaded.reader.read(ModelForwardRequest(
            messages=messages_of(request.messages), chat_template_kwargs=request.chat_template_kwargs,
            add_generation_prompt=form.prompt, continue_final_message=form.continues,
        ))  # fmt: skip
    except InvalidRequest as fault:
        raise InvalidRequest(fault.detail, param="messages") from None


def _prompt_tokens(loaded: LoadedModel, given: Any, field: str) -> list[list[int]]:
    """The token ids of a text, of several, or of what came as ids. Raises InvalidRequest."""
    reader = loaded.reader
    several = isinstance(given, list) and not isinstance(given[0], int)
    found = []
    for index, each in enumerate(given if several else [given]):
        place = f"{field}.{index}" if several else field
        ids = reader.tokens(each, place).ids if isinstance(each, str) else list(each)
        reader.check(ids, place)
        found.append(ids)
    return found


def _places(loaded: LoadedModel, wanted: AttentionOfTokens) -> list[AttentionPlace]:
    """The layers to tell of: those that attend from generated tokens."""
    queries = "target" if loaded.reader.pairs else "text"
    able = {key: place for key, place in loaded.places.items() if place.queries == queries}
    names = list(able) if wanted.layers == "all" else [str(layer) for layer in wanted.layers]
    for name in names:
        if name in loaded.implicit:
            raise InvalidRequest.at("attention.layers", f"layer {name} has implicit weights, {_OF_WHOLE_TEXTS}")
        if name not in able:
            raise InvalidRequest.at("attention.layers", f"expected layers among {', '.join(able)}; got {name}")
        check_indices("attention.heads", wanted.heads, able[name].widths.heads, "heads")
    if CLASS_SHARES in (wanted.statistics or ()) and not wanted.statistic_options.token_classes:
        raise InvalidRequest.at(
            "attention.statistic_options.token_classes", "the statistic classes has no class; name some"
        )
    sinks = any("sink_mass" in able[name].own_statistics for name in names)
    check_able(wanted.statistics, {"sink_mass"} if sinks else (), "attention.statistics")
    check_single_query(wanted.statistics, "attention.statistics")
    check_sink_mass(wanted.statistics, chain.from_iterable(wanted.edits.values()), "attention.statistics")
    return [able[name] for name in names]


def _is_placed(edit: Edit) -> bool:
    """True for an edit of some positions."""
    return bool(edit.queries or edit.keys) or edit.value is not None


def _edits(
    loaded: LoadedModel, wanted: AttentionOfTokens, rows: Sequence[Sequence[int]], sampling: "Sampling"
) -> dict[LayerKey, Sequence[Edit]]:
    length = max(map(len, rows)) + sampling.new_tokens
    found: dict[LayerKey, Sequence[Edit]] = {}
    for name, edits in wanted.edits.items():
        place = loaded.places.get(name)
        if name in loaded.implicit:
            raise InvalidRequest.at(
                "attention.edits",
                f"layer {name} mixes tokens by a running state, which is not edited while tokens are generated; edit "
                "it in a forward request",
            )
        if place is None or place.queries == "media":
            known = ", ".join(each for each, other in loaded.places.items() if other.queries != "media")
            raise InvalidRequest.at("attention.edits", f"expected layers among {known}; got {name}")
        place.check_edits(edits, place.bound(1, length, length), "attention.edits")
        if beside := sorted(MODULE_TAPS.intersection(edit.tap for edit in edits)):
            raise InvalidRequest.at(
                "attention.edits", f"{beside[0]} is not edited while tokens are generated; edit it in a forward request"
            )
        if place.calls > 1 and any(edit.value is not None and edit.tap in {"v", "context"} for edit in edits):
            raise InvalidRequest.at(
                "attention.edits",
                f"layer {name} attends in {place.calls} parts of its values; edit v and context by set or scale while "
                "tokens are generated, or by a value in a forward request",
            )
        if place.keys_of != "tokens" and any(edit.keys or edit.value is not None for edit in edits):
            raise InvalidRequest.at(
                "attention.edits",
                f"layer {name} has the keys of {place.keys_of}, which are not counted as tokens are; leave keys and "
                "value out",
            )
        placed = any(map(_is_placed, edits))
        placed = placed or place.keys == BOTH
        if placed and len({len(row) for row in rows}) > 1:
            raise InvalidRequest.at(
                "attention.edits", "edits of some queries or keys, or with a value, need prompts of one length"
            )
        found[place.key] = edits
    return found
