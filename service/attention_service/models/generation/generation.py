"""Generation: the tokens of transformers' own ``generate``, one by one, for texts that run beside others.

Greedy and drawn tokens are those of ``generate`` with the same settings; choice i of a request is drawn as after
``torch.manual_seed(seed + i)``, whoever draws between.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import replace
from typing import Final, NamedTuple

import torch
from transformers import LogitsProcessorList

from attention_contract.errors import InvalidCheckpoint
from attention_contract.schemas.attention import Edit
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_contract.schemas.openai_api.responses import ResponseRequest
from attention_contract.schemas.openai_api.transcriptions import TranscriptionRequest
from attention_contract.schemas.recordings import RecordingFile
from attention_service.core.cancellation import checkpoint, deadline
from attention_service.models.answers.model_forward import recorded_forward
from attention_service.models.generation.decoding.decode_attention import preparing
from attention_service.models.generation.decoding.decoder import Decoder, Step
from attention_service.models.generation.decoding.generated_text import GeneratedText
from attention_service.models.generation.decoding.heard_frames import HeardFrames
from attention_service.models.generation.decoding.row_edits import RowEdits
from attention_service.models.generation.decoding.running_text import RunningText, begin_text
from attention_service.models.generation.decoding.sampling import Sampling
from attention_service.models.generation.decoding.token_attention import TokenAttention
from attention_service.models.generation.decoding.watched_states import TextWatch
from attention_service.models.generation.objects.completion_objects import CompletionObjects, Token
from attention_service.models.generation.objects.echoed_prompts import echoed, unfinished
from attention_service.models.generation.objects.response_objects import ResponseObjects
from attention_service.models.generation.objects.token_logprobs import Json, TokenLogprobs, logprobs_of
from attention_service.models.generation.objects.transcription_objects import TranscriptionObjects
from attention_service.models.generation.plans.generation_plan import GenerationPlan, GenerationRequest
from attention_service.models.generation.plans.transcription_plan import language_token, silence_of
from attention_service.models.inputs.input_stacks import Stack
from attention_service.models.inputs.token_texts import INCOMPLETE
from attention_service.models.loaded.checked_request import check_request
from attention_service.models.loaded.edit_parts import edits_from
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import weights_with

Objects = CompletionObjects | ResponseObjects | TranscriptionObjects
Emit = Callable[[list[Json]], None]
"""Takes the objects of a step, in the order in which they are sent."""
_OF_SETTINGS: Final = ValueError, TypeError, LookupError, AttributeError, RuntimeError
"""The errors of ``generate`` for settings that it refuses."""
_SENDING_S: Final = 0.1
"""Seconds before the caller's deadline at which a generation ends, so that its answer comes in time."""


class Generated(NamedTuple):
    """The end of a generation."""

    last: list[Json]
    """The objects that end a stream, or the whole."""
    tokens: int
    """The number of generated tokens."""
    recording: RecordingFile | None = None
    """The recording of the run, if the request keeps it."""


class RunningGeneration:
    """One request that generates: its texts, and the objects that tell of them."""

    def __init__(
        self, decoder: Decoder, request: GenerationRequest, plan: GenerationPlan, emit: Emit, reader: str = ""
    ) -> None:
        """``emit`` gets the objects of a stream as they come, but for those that end it.

        ``reader``: who may read on from these texts, and from which others these do.
        """
        self._decoder, self._loaded, self._plan, self._request = decoder, decoder.loaded, plan, request
        self._emit = emit
        self._reader = reader
        self._objects: Objects
        if isinstance(request, ResponseRequest):
            self._objects = ResponseObjects(request, len(plan.rows[0]), plan.sampling)
        elif not isinstance(request, TranscriptionRequest):
            self._objects = CompletionObjects(request, sum(map(len, plan.rows)), plan.choices)
        elif (heard := plan.heard) is not None:
            windows = [(window.begin, window.end) for window in heard.windows]
            self._objects = TranscriptionObjects(request, windows, heard.times)
        self._deadline = deadline()
        self.within = copy_context()
        """The context in which it began: its passes are cancelled as its request is."""
        self._came = 0.0
        """Time of the last step, in ``time.monotonic``."""
        self.told_late: bool | None = None
        """True if the next step is the last by the clock of another process; None: its own clock tells."""
        # A window of a sound is read when the one before has its text; until then it counts as the first, the longest.
        self._unread = list(enumerate(plan.rows if plan.heard is None else plan.rows * len(plan.heard.windows)))
        self._echoed: dict[int, int] = {}
        """The characters of the prompt with which a choice begins."""
        self._reading: RunningText | None = None
        self.texts: list[RunningText] = []
        """The texts that wait for their next token."""
        self.first: list[int] = []
        """The tokens of the first choice, once it has ended."""
        self.times: dict[str, float] = {}
        """Milliseconds of the steps that it had, by their part."""
        self.has_mates = False
        """True if others had some of them too."""
        self.ran: dict[str, float] = {}
        """Further fields of ``ran``."""
        self.joined = 1
        """The most requests that shared a pass."""
        self._edits = RowEdits(self._loaded, plan.edits)
        self._adapter = self._loaded.adapters.active
        if began := self._objects.begin():
            emit(began)

    # ── its turns ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def unread(self) -> int:
        """The tokens of prompts that are still to be read, and can be."""
        if self._plan.heard is not None and self.texts:
            return 0
        reading = 0 if self._reading is None else len(self._reading.ids) - self._reading.seen
        return reading + sum(len(row) for _, row in self._unread)

    @property
    def sizes(self) -> tuple[int, list[int], int]:
        """The number of its texts, the tokens of each prompt that were read, and those that were generated."""
        lengths = [len(row) for row in self._plan.rows]
        kept = self._objects.cached // len(lengths)
        return len(lengths) * self._plan.sampling.choices, [max(1, n - kept) for n in lengths], self._objects.generated

    @property
    def is_seen(self) -> bool:
        """True if its attention is asked for."""
        return self._plan.look is not None

    @property
    def has_ended(self) -> bool:
        """True once every choice has its text."""
        return not (self._unread or self._reading or self.texts)

    @property
    def echoes_alone(self) -> bool:
        """True if its answer is its prompts, without a token behind them."""
        return self._plan.sampling.new_tokens == 0

    def echo_next(self) -> None:
        """Begin the choices of the next prompt with it, which ends them."""
        checkpoint()
        self._echo(*self._unread.pop(0))

    def begin_reading(self) -> RunningText:
        """Return the text whose prompt is to be read next. Raises InvalidCheckpoint."""
        checkpoint()
        if self._reading is None:
            number, row = self._unread.pop(0)
            self._reading = self._begun(number, row)
        return self._reading

    def was_read(self, step: Step) -> None:
        """Take the step that follows a prompt: each of its choices has a token. Raises the fault of a text."""
        text, steps = step.text, [step]
        self._reading = None
        self._decoder.keep_prompt(text, self._reader)
        if self._plan.echoes:
            number = text.choice // self._plan.sampling.choices
            self._echo(number, self._plan.rows[number])
        for index in range(1, self._plan.sampling.choices):
            other = text.fork(text.choice + index, self._text(text.ids), self._look(text))
            self._seed(other)
            token = 0 if step.logits is None else other.choose(step.logits.clone())
            steps.append(Step(other, step.logits, token, step.layers, fault=step.fault))
        self.texts += [read_step.text for read_step in steps]
        self.take(steps)

    def _echo(self, number: int, ids: list[int]) -> None:
        """Begin the choices of a prompt with it."""
        plan, given = self._plan, getattr(self._request, "prompt", None)
        sent = (given if isinstance(given, list) else [given])[number]
        text = sent if isinstance(sent, str) else None
        edits = {} if self._request.attention is None or plan.edits_answer else self._request.attention.edits
        choices = range(number * plan.sampling.choices, (number + 1) * plan.sampling.choices)
        ends_here = plan.sampling.new_tokens == 0
        with self._loaded.adapters.using(self._adapter):
            special = getattr(self._request, "add_special_tokens", None) is not False
            prompts = echoed(self._loaded, ids, text, edits, plan.sampling, choices, special=special)
        for tokens in prompts:
            if ends_here:
                tokens[-1].finish = "length"
                tokens[-1].text += unfinished(tokens)
            self._echoed[tokens[0].choice] = sum(len(token.text) for token in tokens)
            if isinstance(self._objects, CompletionObjects) and (objects := self._objects.echo(tokens)):
                self._emit(objects)

    def take(self, steps: Sequence[Step]) -> None:
        """Take one step of some of its texts, and give their tokens out. Raises the fault of a text."""
        late, given = self.is_late() if self.told_late is None else self.told_late, []
        for step in steps:
            if step.fault is not None:
                raise step.fault
            self.joined = max(self.joined, step.joined)
            given.append(self._token(step, late=late))
        if late and self._plan.heard is not None:
            self._unread.clear()
        if objects := self._objects.add(given):
            self._emit(objects)

    def _token(self, step: Step, *, late: bool) -> Token:
        text, token, reader = step.text, step.token, self._loaded.reader
        heard = self._plan.heard
        if heard is not None and heard.last_frames and text.heard and text.heard.looks_at_end(heard.last_frames):
            self._end(text)
            return Token(text.choice, text.text.rest(), text.text.given, "stop", None, None)
        place = len(text.ids)
        text.ids.append(token)
        text.steps += 1
        scores = None if text.watch is None else text.watch.scores
        sampling = self._plan.sampling
        logprob = (
            None if sampling.logprobs is None else self._logprobs(step, sampling)
        )  # in its place, before it is taken
        times = None if heard is None else heard.times
        if times is not None and times.seconds(token) is not None:
            piece, logprob = text.text.pass_over(), None
        else:
            piece = text.text.add(token)
        ends = token in self._plan.ends
        watched = {} if text.watch is None else self._watched(text, text.watch)
        finish = "stop" if ends or text.text.stopped or "stop_reason" in watched else None
        limit = reader.max_length if reader.pairs else None  # what the decoder began with counts too
        longest = limit is not None and len(text.ids) >= limit
        if finish is None and (late or longest or text.steps >= self._plan.sampling.new_tokens):
            finish = "length"
        if finish is not None:
            piece += text.text.rest()
            if logprob is not None:
                logprob.chosen.raw = text.text.last.raw
            self._end(text)
        elif token >= (known := reader.predictable if reader.pairs else reader.vocabulary):
            raise InvalidCheckpoint.at("model", f"it chose token {token}, and has embeddings for {known} tokens")
        attention: Json | None = None
        if step.layers is not None or scores is not None:
            (name,) = reader.readable([token])
            attention = {"position": place, "token": name, "id": token, "layers": step.layers or []}
            attention |= {} if scores is None else {"scores": scores}
        at = text.text.last.begin + self._echoed.get(text.choice, 0)
        return Token(
            text.choice, piece, at, finish, logprob, attention, text.text.last.raw, watched, -1 if ends else token
        )

    def _watched(self, text: RunningText, watch: TextWatch) -> Json:
        """The fields of a choice that the scores of its probes give with its new token."""
        reason = None if text.steps < self._plan.sampling.least_tokens else watch.stopped(text.steps)
        told: Json = {} if reason is None else {"stop_reason": reason}
        return told | ({"prompt_scores": watch.prompt} if watch.prompt and text.steps == 1 else {})

    def _end(self, text: RunningText) -> None:
        self.texts.remove(text)
        is_first = text.choice % self._plan.sampling.choices == 0  # each other begins with the same prompt
        self._decoder.drop(text, self._reader if is_first else None)
        if text.choice == 0:
            self.first = text.ids

    def leave(self) -> None:
        """Forget all texts."""
        for text in self.texts:
            self._decoder.drop(text)
        self.texts, self._reading = [], None
        self._unread.clear()

    def run_again(self) -> None:
        """Run the model once more over the tokens of a text, all at once."""
        ids = next((text.ids for text in self.texts), self.first)
        with self._loaded.adapters.using(self._adapter):
            _run_whole(self._loaded, self._request, self._plan, ids)

    def end(self) -> Generated:
        """Return the end, with the recording of the run if the request keeps it."""
        recording = None
        if self._plan.keeps:
            with self._loaded.adapters.using(self._adapter):
                recording = _run_whole(self._loaded, self._request, self._plan, self.first)
        ran = {"joined": self.joined, "weights": weights_with(self._loaded, self._adapter), **self.ran}
        return Generated(self._objects.end(ran, keeps=self._plan.keeps), self._objects.generated, recording)

    # ── its texts ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begun(self, number: int, row: list[int]) -> RunningText:
        """Prepare a prompt as ``generate`` does. Raises InvalidCheckpoint for settings that it refuses."""
        plan, model = self._plan, self._loaded.model
        settings = plan.sampling.options() | {
            "pad_token_id": plan.padding, "eos_token_id": sorted(plan.ends) or None,
            "logits_processor": LogitsProcessorList(plan.sampling.processors()),
        }  # fmt: skip
        prompt, given = None, plan.arguments
        if (heard := plan.heard) is not None:
            prompt = heard.first if number == 0 else heard.read(heard.windows[number])
            row, given = prompt.ids, prompt.arguments
            if not self._loaded.reader.pairs:
                row = [*row, *heard.accepted]
        decodes = heard is not None and self._loaded.reader.pairs
        if heard is not None and decodes:
            # Its tokens are counted below: the first tokens of the decoder are not known here.
            settings |= {"max_new_tokens": 1, **heard.settings}
            if isinstance(self._objects, TranscriptionObjects) and self._objects.language_token is not None:
                settings["language"] = self._objects.language_token  # of the first window
        arguments = {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in given.items()}
        edits = encoding = self._edits
        if plan.edits_answer:
            first = 0 if self._loaded.reader.pairs else len(row)
            edits, encoding = RowEdits(self._loaded, plan.edits, first), RowEdits(self._loaded, {})
        try:
            adapted = self._loaded.adapters.using(self._adapter)
            with torch.inference_mode(), adapted, preparing(self._decoder.attention, encoding):
                begun = begin_text(model, None if decodes else row, settings, arguments)
        except _OF_SETTINGS as fault:
            reason = str(fault).strip().partition("\n")[0]
            raise InvalidCheckpoint.at("model", f"its generation_config.json cannot be used: {reason}") from fault
        if heard is not None and decodes:
            begun = begun._replace(ids=[*begun.ids, *heard.accepted])
        text = RunningText(
            number * plan.sampling.choices, model, begun.ids, begun.state, begun.processors, begun.draws,
            self._text(row), edits, None, plan.alone, id(self), self._adapter,
        )  # fmt: skip
        text.held = self._decoder.states.take()
        text.prompt = len(row)
        if isinstance(self._objects, TranscriptionObjects) and heard is not None and prompt is not None:
            text.heard = HeardFrames(
                heard.heads, prompt.seconds, heard.median_width, silence_of(heard, model, begun.ids)
            )
            self._objects.prefix = self._loaded.reader.decoder.decode(heard.accepted).rstrip(INCOMPLETE)
            self._objects.begin_window(text.heard, language_token(model.generation_config, begun.ids), heard.language)
        text.look = self._look(text)
        text.watch = TextWatch(plan.watch, text.prompt) if plan.watch else None
        self._seed(text)
        self._objects.cached += self._decoder.recall(text, self._reader)
        return text

    def _look(self, text: RunningText) -> TokenAttention | None:
        plan, prompt = self._plan, text.choice // self._plan.sampling.choices
        if plan.look is None:
            return None
        spans = plan.spans[prompt] if plan.spans else ()
        return TokenAttention(plan.look, plan.places, text.prompt, spans, plan.pairs[prompt] if plan.pairs else None)

    def _text(self, prompt: list[int]) -> GeneratedText:
        reader, plan = self._loaded.reader, self._plan
        before = [] if reader.pairs else prompt
        if plan.heard is not None and reader.pairs:
            before = [*plan.heard.accepted]
        stops, unstopped = plan.sampling.stops, plan.sampling.least_tokens
        return GeneratedText(reader.decoder, before, stops, unstopped, echoed=plan.echoes)

    def _seed(self, text: RunningText) -> None:
        text.generator = torch.Generator(self._loaded.model.device)
        if (seed := self._plan.sampling.seed) is None:
            text.generator.manual_seed(int(torch.randint(2**63 - 1, ())))
        else:
            text.generator.manual_seed((seed + text.choice) % 2**64)

    def is_late(self) -> bool:
        """True if another step as long as the last would end after the caller's deadline."""
        now = time.monotonic()
        step = now - self._came if self._came else 0.0  # the first also read the prompt
        self._came = now
        return now + step + _SENDING_S > self._deadline

    def _logprobs(self, step: Step, sampling: Sampling) -> TokenLogprobs | None:
        """The log-probability of a token, and other tokens in its place, before anything changed the logits."""
        if step.logits is None:
            return None
        logs = torch.log_softmax(step.logits[0], -1)
        decoder, count = self._loaded.reader.decoder, sampling.logprobs or 0
        return logprobs_of(decoder, step.token, step.text.text.peek, logs, count, sampling.named_tokens)


def _run_whole(
    loaded: LoadedModel, request: GenerationRequest, plan: GenerationPlan, tokens: list[int]
) -> RecordingFile | None:
    """Run the model over all tokens at once, and record it: those of a decoder are the target of the prompt."""
    pairs = loaded.reader.pairs
    kept = ModelForwardRequest(tokens=plan.rows[0] if pairs else tokens, images=[*plan.images], top_k=0, keep=True)
    edits: Mapping[str, Sequence[Edit]] = {} if request.attention is None else request.attention.edits
    if plan.edits_answer and not pairs:
        edits = edits_from(edits, plan.longest, len(tokens))
    checked = replace(check_request(loaded, kept), edits=edits)
    if pairs:
        target = Stack(torch.tensor([tokens], device=loaded.model.device), None, [[None] * len(tokens)])
        arguments = checked.inputs.arguments | {"decoder_input_ids": target.ids}
        checked = replace(checked, inputs=replace(checked.inputs, target=target, arguments=arguments))
    return recorded_forward(loaded, kept, checked).recording
