"""The plan of a generation: its prompts, settings, layers and edits, checked, with the memory that it takes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final, NamedTuple

from torch import Tensor

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.attention import Edit
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_contract.schemas.openai import AttentionOfTokens, ChatCompletionRequest, CompletionRequest
from attention_contract.schemas.openai_api.responses import ResponseRequest
from attention_contract.schemas.openai_api.transcriptions import TranscriptionRequest
from attention_contract.schemas.prompts import ImageBytes, images_in, sounds_in
from attention_contract.schemas.weights import BY_KEY, NEEDS_PAIRS
from attention_service.core.inspection.statistics import CLASS_SHARES, DEFAULT_STATISTICS, PAIRS, statistics_of
from attention_service.models.costs.generation_memory import generation_bytes, kept_bytes
from attention_service.models.generation.decoding.sampling import CHAT_TOKENS, Sampling, TextRequest
from attention_service.models.generation.decoding.token_attention import NamedTokens, is_cross
from attention_service.models.generation.plans.planned_edits import is_placed, planned_edits
from attention_service.models.inputs.input_stacks import Inputs, Seconds, Span, Stack
from attention_service.models.inputs.sounds.sound_windows import SoundWindow
from attention_service.models.inputs.sounds.time_tokens import TimeTokens
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.streams.watched_probes import Watched, WatchedHeads
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.prompts.conversations import ChatForm, Conversation, messages_of
from attention_service.prompts.named_pairs import TextPairs, text_pairs
from attention_service.prompts.named_spans import span_tokens
from attention_service.runtime.binding.bound_statistics import check_able, check_single_query, check_unspoiled
from attention_service.runtime.binding.selection import check_indices
from attention_transformers.model_layers import LayerKey

_REPORTED: Final = 64
"""Bytes of each number that is told of a token: as float64 while it is computed, and as text."""
_KEPT: Final = 8
"""Bytes of each number of a recording: as float32, and once more as it is sent."""
GenerationRequest = ChatCompletionRequest | CompletionRequest | ResponseRequest | TranscriptionRequest

_OF_WHOLE_TEXTS: Final = "leave attention out, and ask for the weights of the text (/v1/models/{model}/weights)"
"""The advice for a layer whose weights do not come with generated tokens."""


class HeardPrompt(NamedTuple):
    """The input of a model that writes down a window of a sound."""

    ids: list[int]
    arguments: Mapping[str, Tensor]
    seconds: Sequence[Seconds]
    """The part of the sound that each key of the layers that look at it is; None of a key that is no part of it."""
    media: Stack | None = None


@dataclass(frozen=True)
class Heard:
    """The sound that a text is written down from, one window after the other."""

    settings: Mapping[str, Any]
    """Arguments of ``generate`` for its language and prompt."""
    heads: Mapping[LayerKey, Sequence[int]]
    """The alignment heads of each layer that has some."""
    windows: Sequence[SoundWindow]
    first: HeardPrompt
    """The prompt of the first window, which is the longest."""
    read: Callable[[SoundWindow], HeardPrompt]
    """Makes the prompt of a later one."""
    median_width: int
    language: str | None = None
    """The language that the prompt names, in English."""
    times: TimeTokens | None = None
    """The tokens of times that the text has, if it is to have some."""
    silence: int | None = None
    """The token that nothing is said, if its probability is asked."""
    accepted: Sequence[int] = ()
    """The tokens of the text that are given."""
    last_frames: int = 0
    """The frames at the end of the sound at which no token looks that the text takes; 0 for none."""

    @property
    def held_bytes(self) -> int:
        """The memory of the samples from which later windows are read."""
        return sum(window.sound.samples.nbytes for window in self.windows[1:])


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

    edits_answer: bool = False
    """True if the edits leave the prompt as it is."""
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
    watch: Sequence[Watched] = ()
    """The probes that score its tokens."""
    spans: Sequence[NamedTokens] = ()
    """The named parts of each prompt, if there are some."""
    pairs: Sequence[TextPairs] = ()
    """The pairs of each text, if they are told of."""

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
        need = generation_bytes(loaded, self.choices, self.longest, self.sampling.new_tokens, alone=self.alone)
        need += 0 if self.heard is None else self.heard.held_bytes
        if self.echoes and self.sampling.logprobs is not None:  # of one prompt at a time
            vocabulary = int(loaded.model.config.get_text_config().vocab_size)
            need += self.longest * vocabulary * (4 + loaded.model.dtype.itemsize)
        return need + _REPORTED * (self.reported_numbers() + self.watched_numbers()) + _KEPT * self.kept_numbers(loaded)

    def cache_bytes(self, loaded: LoadedModel) -> int:
        """Estimate the memory of keys, values and states."""
        return self.choices * kept_bytes(loaded, self.longest + self.sampling.new_tokens, alone=self.alone)

    def kept_numbers(self, loaded: LoadedModel) -> int:
        """The numbers of the recording, if the run is kept."""
        if not self.keeps:
            return 0
        width = int(loaded.model.config.get_text_config().hidden_size)
        images = 0 if self.vision is None else self.vision.ids.numel()
        numbers = 0
        for place in loaded.places.values():
            length = images if place.queries == "media" else self.longest + self.sampling.new_tokens
            numbers += length * (place.widths.heads * length + width)
        return numbers

    def watched_numbers(self) -> int:
        """Count of the scores of probes, and of the features of a token in each text, or of those of a prompt."""
        found = 0
        for probe in self.watch:
            scored = self.longest if probe.prompt else 0
            features = len(probe.weights) * max(1, scored)
            if isinstance(probe, WatchedHeads):  # of the weights of one layer
                length = self.longest + self.sampling.new_tokens
                features += length * max(place.widths.heads for place in probe.places)
            found += scored + self.sampling.new_tokens + features
        return self.choices * found

    def reported_numbers(self) -> int:
        """Count of attention numbers in the reply."""
        if (look := self.look) is None:
            return 0
        heads = sum(place.widths.heads if look.heads is None else len(look.heads) for place in self.places)
        tokens, length = self.sampling.new_tokens, self.longest + self.sampling.new_tokens
        names = len(DEFAULT_STATISTICS if look.statistics is None else look.statistics)
        names += len(look.statistic_options.token_classes) + len(look.statistic_options.spans) + bool(self.pairs)
        by_key = len(BY_KEY.intersection(look.statistics or ())) + look.weights
        numbers = names + 2 * min(look.top_k, length) + length * by_key
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
    sampling = replace(sampling, named_tokens=_named(loaded, request))
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
    if changes is not None and (beyond := [token_id for token_id in changes.bias if token_id >= known]):
        raise InvalidRequest.at("logit_bias", f"token {beyond[0]} is out of range; there are {known}")
    for index, token in enumerate(request.stop_token_ids or ()):
        if token >= known:
            raise InvalidRequest.at(f"stop_token_ids.{index}", f"token {token} is out of range; there are {known}")
    more["echoes"] = _echo(loaded, request)
    more["spans"] = _spans(loaded, request, rows, alone=not more.get("arguments"))
    return looking_plan(loaded, request.attention, rows, sampling, alone=bool(request.alone), **more)


def looking_plan(
    loaded: LoadedModel, wanted: AttentionOfTokens | None, rows: list[list[int]], sampling: "Sampling", **more: Any
) -> GenerationPlan:
    """The plan of these prompts, with the attention that is asked of each token. ``more``: further fields of it.

    Raises InvalidRequest.
    """
    settings, reader = loaded.model.generation_config, loaded.reader
    ends = frozenset(token_id for token_id in reader.end_ids(loaded.model) if 0 <= token_id < reader.predictable)
    padding = next((token_id for token_id in (settings.pad_token_id, *sorted(ends)) if reader.knows(token_id)), 0)
    ends = (frozenset() if sampling.ignores_end else ends) | sampling.stop_ids
    if wanted is None:
        return GenerationPlan(rows, padding, ends, sampling, None, (), {}, **more)
    places = _places(loaded, wanted)
    edits = planned_edits(loaded, wanted, rows, sampling.new_tokens)
    edits_answer = wanted.from_ == "answer"
    if (
        not edits_answer
        and more.get("echoes")
        and sampling.logprobs is not None
        and any(is_placed(edit) for own in edits.values() for edit in own)
    ):
        raise InvalidRequest.at("echo", "edits of some queries or keys go without echo and logprobs")
    if wanted.keep and (len(rows) > 1 or sampling.choices > 1):
        raise InvalidRequest.at("attention.keep", "a recording is of one choice of one prompt")
    changes_alone = not loaded.places and bool(edits)
    silent = wanted.statistics == [] or (wanted.statistics is None and (bool(wanted.watch) or changes_alone))
    look = None if silent and not (wanted.top_k or wanted.weights) else wanted
    if look is not None and silent:
        look = wanted.model_copy(update={"statistics": []})
    if wanted.statistic_options.spans and not more.get("spans"):
        raise InvalidRequest.at(
            "attention.statistic_options.spans", "they are parts of a prompt of text; leave them out"
        )
    if not loaded.places and (look or wanted.keep):
        raise InvalidRequest.at(
            "attention",
            f"{loaded.without_attention}, which are those of a whole text, and are not made token by token; "
            f"{_OF_WHOLE_TEXTS}",
        )
    more["pairs"] = _pairs(loaded, wanted, places, rows, sampling.new_tokens, text=not more.get("arguments"))
    return GenerationPlan(rows, padding, ends, sampling, look, places, edits, edits_answer, keeps=wanted.keep, **more)


def _prompts(loaded: LoadedModel, request: TextRequest) -> list[list[int]]:
    reader = loaded.reader
    if reader.tokenizer is None:
        field = "messages" if isinstance(request, ChatCompletionRequest) else "prompt"
        raise InvalidRequest.at(field, f"{reader.no_tokenizer}, so its tokens have no text")
    if isinstance(request, ChatCompletionRequest):
        written = reader.conversation(messages_of(request.messages), ChatForm.of(request)).text
        ids = reader.tokens(written, "messages", special=bool(request.add_special_tokens)).ids
        reader.check(ids, "messages")
        return [ids]
    return _prompt_tokens(loaded, request.prompt, "prompt", special=request.add_special_tokens is not False)


def _named(loaded: LoadedModel, request: TextRequest) -> tuple[int, ...]:
    """The tokens whose log-probabilities are asked for by name. Raises InvalidRequest."""
    field = "logprob_tokens" if request.logprob_token_ids is None else "logprob_token_ids"
    ids = [loaded.reader.token_id(token, f"{field}.{at}") for at, token in enumerate(request.named_tokens)]
    return tuple(dict.fromkeys(ids))


def _spans(loaded: LoadedModel, request: TextRequest, rows: list[list[int]], *, alone: bool) -> list[NamedTokens]:
    """The named parts of each prompt. ``alone``: it is text alone. Raises InvalidRequest."""
    named = () if request.attention is None else request.attention.statistic_options.spans
    if not named:
        return []
    written: list[str | Conversation | None] = [None] * len(rows)
    if isinstance(request, ChatCompletionRequest):
        form = ChatForm.of(request)
        written = [loaded.reader.conversation(messages_of(request.messages), form, parted=True)] if alone else [None]
    elif isinstance(request.prompt, str):
        written = [request.prompt]
    elif isinstance(request.prompt[0], str):
        written = [written_prompt if isinstance(written_prompt, str) else None for written_prompt in request.prompt]
    named_spans = []
    for row, text in zip(rows, written, strict=True):
        spans: Sequence[Span] = [None] * len(row)
        if text is not None:
            prompt = isinstance(text, str)
            special = prompt if request.add_special_tokens is None else request.add_special_tokens
            written_text = text if isinstance(text, str) else text.text
            read = loaded.reader.tokens(written_text, "prompt" if prompt else "messages", special=special)
            spans = read.spans
        of = [f"attention.statistic_options.spans.{number}" for number in range(len(named))]
        named_spans.append(tuple(
            (span.name, tuple(span_tokens(span, at, range(len(row)), spans, text)))
            for span, at in zip(named, of, strict=True)
        ))  # fmt: skip
    return named_spans


def _pairs(
    loaded: LoadedModel, wanted: AttentionOfTokens, places: Sequence[AttentionPlace], rows: list[list[int]],
    new_tokens: int, *, text: bool,
) -> list[TextPairs]:  # fmt: skip
    """The pairs of each text. ``text``: the prompts are text alone. Raises InvalidRequest."""
    names, crossed = wanted.statistics or (), [is_cross(place.key) for place in places]
    if PAIRS in names and not text and (loaded.reader.pairs or any(crossed)):
        raise InvalidRequest.at(
            f"attention.statistics.{[*names].index(PAIRS)}",
            "pairs count the tokens of a text, and layers here look at an image or a sound; leave it out",
        )
    firsts = [0 if loaded.reader.pairs else len(row) - 1 for row in rows]
    return text_pairs(
        wanted.statistic_options, [range(first, first + new_tokens) for first in firsts], asked=PAIRS in names,
        own=not (crossed and all(crossed)), sources=[*map(len, rows)] if any(crossed) else None,
    )  # fmt: skip


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
    if request.add_special_tokens:
        raise InvalidRequest.at("add_special_tokens", "the checkpoint's processor writes those of images and sounds")
    try:
        form = ChatForm.of(request)
        return loaded.reader.read(ModelForwardRequest(
            messages=messages_of(request.messages), chat_template_kwargs=request.chat_template_kwargs,
            add_generation_prompt=form.prompt, continue_final_message=form.continues,
        ))  # fmt: skip
    except InvalidRequest as fault:
        raise InvalidRequest(fault.detail, param="messages") from None


def _prompt_tokens(loaded: LoadedModel, given: Any, field: str, *, special: bool) -> list[list[int]]:
    """The token ids of a text, of several, or of what came as ids. Raises InvalidRequest."""
    reader = loaded.reader
    several = isinstance(given, list) and not isinstance(given[0], int)
    ids_of_prompts = []
    for index, prompt in enumerate(given if several else [given]):
        place = f"{field}.{index}" if several else field
        ids = reader.tokens(prompt, place, special=special).ids if isinstance(prompt, str) else list(prompt)
        reader.check(ids, place)
        ids_of_prompts.append(ids)
    return ids_of_prompts


def _places(loaded: LoadedModel, wanted: AttentionOfTokens) -> list[AttentionPlace]:
    """The layers to tell of: those that attend from generated tokens."""
    able = loaded.reported
    names = list(able) if wanted.layers == "all" else [str(layer) for layer in wanted.layers]
    for name in names:
        if name not in able:
            place = loaded.places.get(name) or loaded.implicit.get(name)
            reason = "there is none" if place is None else loaded.runner.refuses((place.key, "weights"), "report")
            advice = f"expected layers among {', '.join(able)}" if able else _OF_WHOLE_TEXTS
            raise InvalidRequest.at("attention.layers", f"layer {name}: {reason}; {advice}")
        check_indices("attention.heads", wanted.heads, able[name].widths.heads, "heads")
    options = wanted.statistic_options
    if CLASS_SHARES in (wanted.statistics or ()) and not (options.token_classes or options.spans):
        raise InvalidRequest.at(
            "attention.statistic_options.token_classes", "the statistic classes has no class; name some, or spans"
        )
    some = frozenset[str]().union(*(statistics_of(able[name].spec) for name in names))
    check_able(wanted.statistics, some | NEEDS_PAIRS, "attention.statistics")
    check_single_query(wanted.statistics, "attention.statistics")
    check_unspoiled(wanted.statistics, chain.from_iterable(wanted.edits.values()), "attention.statistics")
    return [able[name] for name in names]
