"""Generation: transformers' own ``generate``, whose tokens are given out one by one as they come.

Greedy and drawn tokens are those of ``generate`` with the same settings after the same ``torch.manual_seed``.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from attention_contract.errors import InvalidCheckpoint
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_service.core.cancellation import checkpoint, deadline
from attention_service.models.answers.model_inspection import forward_reply
from attention_service.models.generation.completion_objects import CompletionObjects, Json, Token
from attention_service.models.generation.generated_text import GeneratedText
from attention_service.models.generation.generation_attention import GenerationAttention, PromptPadding, TokenAttention
from attention_service.models.generation.generation_plan import GenerationPlan, GenerationRequest
from attention_service.models.inputs.model_inputs import Stack
from attention_service.models.loaded.loaded_model import LoadedModel

Emit = Callable[[list[Json]], None]
"""Takes the objects of a step, in the order in which they are sent."""
_OF_SETTINGS: Final = ValueError, TypeError, LookupError, AttributeError, RuntimeError
"""The errors of ``generate`` for settings that it refuses."""
_SENDING_S: Final = 0.1
"""Seconds before the caller's deadline at which a generation ends, so that its answer comes in time."""
_UNLIKELY: Final = -9999.0
"""The log-probability by which OpenAI's API tells of a token that is very unlikely."""


class Generated(NamedTuple):
    """The end of a generation."""

    last: list[Json]
    """The objects that end a stream, or the whole."""
    tokens: int
    """The number of generated tokens."""


def generate(loaded: LoadedModel, request: GenerationRequest, plan: GenerationPlan, emit: Emit) -> Generated:
    """Generate. ``emit`` gets the objects of a stream as they come, but for those that end it.

    With ``keep``, ``LoadedModel.recording`` then holds the run. Raises Abandoned between two tokens if nobody waits any
    more.
    """
    model, sampling, tokenizer = loaded.model, plan.sampling, loaded.reader.tokenizer
    prompts = [row for row in plan.rows for _ in range(sampling.choices)]  # as ``num_return_sequences`` has them
    ids, mask, pads = _batch(prompts, plan.padding, model.device, left=not loaded.reader.pairs)
    objects = CompletionObjects(request, sum(map(len, plan.rows)), plan.choices)
    look = None
    if plan.look is not None:
        look = TokenAttention(plan.look, plan.places, pads, [*map(len, prompts)])
    padding = PromptPadding(pads, [*map(len, prompts)], model.device)
    attention = GenerationAttention(loaded, look, plan.edits, padding)
    if began := objects.begin():
        emit(began)
    with attention.installed(), _logits(model, sampling.logprobs) as logits:
        before = [[] if loaded.reader.pairs else prompt for prompt in prompts]
        texts = [GeneratedText(tokenizer, prompt, sampling.stops) for prompt in before]
        events = TokenEvents(texts, pads, loaded, plan, lambda each: _given(objects.add(each), emit), logits, attention)
        if sampling.seed is None:
            torch.seed()
        else:
            torch.manual_seed(sampling.seed)
        run: Any = model.generate
        try:
            with torch.inference_mode():
                found = run(
                    ids, attention_mask=mask, pad_token_id=plan.padding, eos_token_id=sorted(plan.ends) or None,
                    logits_processor=LogitsProcessorList(sampling.processors()),
                    stopping_criteria=StoppingCriteriaList([events]), **sampling.options(),
                    **_repeated(plan.arguments, sampling.choices, model.dtype),
                )  # fmt: skip
        except _OF_SETTINGS as fault:
            if events.steps if loaded.reader.pairs else attention.begun:  # an encoder runs before they are read
                raise
            reason = str(fault).strip().partition("\n")[0]
            raise InvalidCheckpoint.at("model", f"its generation_config.json cannot be used: {reason}") from fault
    if plan.keeps:
        _keep(loaded, request, plan, found[0].tolist())
    return Generated(objects.end(keeps=plan.keeps), objects.generated)


def _keep(loaded: LoadedModel, request: GenerationRequest, plan: GenerationPlan, tokens: list[int]) -> None:
    """Run the model over all tokens at once, and keep the run: those of a decoder are the target of the prompt."""
    pairs = loaded.reader.pairs
    kept = ModelForwardRequest(tokens=plan.rows[0] if pairs else tokens, images=[*plan.images], top_k=0, keep=True)
    asked = replace(loaded.asked(kept), edits={} if request.attention is None else request.attention.edits)
    if pairs:
        target = Stack(torch.tensor([tokens], device=loaded.model.device), None, [[None] * len(tokens)])
        arguments = asked.inputs.arguments | {"decoder_input_ids": target.ids}
        asked = replace(asked, inputs=replace(asked.inputs, target=target, arguments=arguments))
    forward_reply(loaded, kept, asked)


def _repeated(arguments: Mapping[str, Tensor], choices: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The arguments of one prompt for each choice."""
    return {
        name: (x.to(dtype) if x.is_floating_point() else x).repeat(choices, *[1] * (x.ndim - 1))
        for name, x in arguments.items()
    }


def _given(objects: list[Json], emit: Emit) -> None:
    if objects:
        emit(objects)


def _batch(
    prompts: Sequence[list[int]], padding: int, device: torch.device, *, left: bool
) -> tuple[Tensor, Tensor, list[int]]:
    """The prompts as one batch with its mask, and the padding before each."""
    longest = max(map(len, prompts))
    missing = [longest - len(row) for row in prompts]
    ends = [(pad, 0) if left else (0, pad) for pad in missing]
    rows = [(first, row, last) for (first, last), row in zip(ends, prompts, strict=True)]
    ids = [[padding] * first + row + [padding] * last for first, row, last in rows]
    mask = [[0] * first + [1] * len(row) + [0] * last for first, row, last in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device), [first for first, _ in ends]


@dataclass(eq=False)
class TokenEvents(StoppingCriteria):
    """Sees each step of ``generate``: gives its tokens out, and ends a choice at a stop text."""

    texts: Sequence[GeneratedText]
    pads: Sequence[int]
    """The padding before the prompt of each choice."""
    loaded: LoadedModel
    plan: GenerationPlan
    give: Callable[[list[Token]], None]
    logits: "Logits | None"
    attention: GenerationAttention

    def __post_init__(self) -> None:
        self._finished = [False] * len(self.texts)
        self.steps = 0
        self._deadline = deadline()
        self._came = 0.0
        """Time of the last step, in ``time.monotonic``."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Return which choices have ended, bool ``[B]``. ``input_ids [B, T]``: all tokens, the new ones last."""
        checkpoint()
        self.steps += 1
        length = self.attention.seen = input_ids.shape[1] - 1
        tokens = input_ids[:, -1].tolist()
        logprobs = None if self.logits is None else self.logits.of(tokens, self.loaded.reader.tokenizer)
        look = self.attention.look
        layers = None if look is None else look.of(input_ids[:, :-1])
        names = [] if look is None else self.loaded.reader.readable(tokens)
        last = self.steps >= self.plan.sampling.new_tokens or self._is_late()
        given = []
        for choice, (token, text) in enumerate(zip(tokens, self.texts, strict=True)):
            if self._finished[choice]:
                continue
            at, piece = text.given, text.add(token)
            ends = token in self.plan.ends
            if ends or last or text.stopped:
                self._finished[choice], piece = True, piece + text.rest()
            finish = None if not self._finished[choice] else "stop" if ends or text.stopped else "length"
            attention = None
            if layers is not None:
                place = length - self.pads[choice]
                attention = {"position": place, "token": names[choice], "id": token, "layers": layers[choice]}
            given.append(Token(choice, piece, at, finish, None if logprobs is None else logprobs[choice], attention))
        self.give(given)
        self._check_readable(tokens)
        return torch.tensor(self._finished, device=input_ids.device)

    def _is_late(self) -> bool:
        """True if another step as long as the last would end after the caller's deadline."""
        now = time.monotonic()
        step = now - self._came if self.steps > 1 else 0.0  # the first also read the prompt
        self._came = now
        return now + step + _SENDING_S > self._deadline

    def _check_readable(self, tokens: Sequence[int]) -> None:
        """Raise InvalidCheckpoint if the next step has a token to read that its head names and its table lacks."""
        known = self.loaded.reader.predictable if self.loaded.reader.pairs else self.loaded.reader.vocabulary
        for token, finished in zip(tokens, self._finished, strict=True):
            if token >= known and not finished:
                raise InvalidCheckpoint.at("model", f"it chose token {token}, and has embeddings for {known} tokens")


class Logits:
    """Log-probabilities by the logits of the last pass, before anything changes them."""

    def __init__(self, count: int) -> None:
        """``count``: the likeliest tokens to name in each place."""
        self._count = count
        self._logits = torch.empty(0)

    def keep(self, _module: Any, _inputs: Any, output: Any) -> None:
        """Keep the logits of the last token; a hook of the model."""
        self._logits = output.logits[:, -1]

    def of(self, tokens: list[int], tokenizer: Any) -> list[Json]:
        """The log-probability of each choice's token, and the likeliest tokens in its place."""
        found = torch.log_softmax(self._logits.float(), -1)
        chosen = found.gather(1, torch.tensor(tokens, device=found.device)[:, None])[:, 0].tolist()
        top = found.topk(self._count, -1)
        rows = zip(tokens, chosen, top.indices.tolist(), top.values.tolist(), strict=True)
        return [
            _told(tokenizer, token, logprob)
            | {"top_logprobs": [_told(tokenizer, *each) for each in zip(ids, values, strict=True)]}
            for token, logprob, ids, values in rows
        ]


@contextmanager
def _logits(model: Any, count: int | None) -> Iterator[Logits | None]:
    """See the logits of each pass until the block ends; None if nobody asked."""
    if count is None:
        yield None
        return
    logits = Logits(count)
    hook = model.register_forward_hook(logits.keep)
    try:
        yield logits
    finally:
        hook.remove()


def _told(tokenizer: Any, token: int, logprob: float) -> Json:
    text = tokenizer.decode([token]) or str(tokenizer.convert_ids_to_tokens(token) or token)
    whole = "\N{REPLACEMENT CHARACTER}" not in text
    told = "NaN" if math.isnan(logprob) else max(logprob, _UNLIKELY)
    return {"token": text, "bytes": list(text.encode()) if whole else None, "logprob": told}
