"""The operations of a whole model. Each request is checked and priced before it runs."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from attention_contract.base import WireModel
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.context import ContextRequest
from attention_contract.schemas.analyses.lenses import JacobianRequest, ModelLensRequest
from attention_contract.schemas.analyses.model_effects import ModelEffectsRequest
from attention_contract.schemas.costs.accuracy import Computation
from attention_contract.schemas.costs.model_complexity import ModelComplexityRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest, ModelWeightsRequest
from attention_contract.schemas.openai import ChatCompletionRequest, CompletionRequest, EmbeddingRequest
from attention_contract.schemas.openai_api.responses import ResponseRequest
from attention_contract.schemas.openai_api.tokenization import TokenizeRequest
from attention_contract.schemas.openai_api.transcriptions import TranscriptionRequest
from attention_contract.schemas.prompts import AudioBytes, ImageBytes, ModelInput, images_in, sounds_in
from attention_contract.schemas.text_similarity import TextSimilarityRequest
from attention_contract.wire import JSON, from_body
from attention_service.models.answers.base_comparison import compared_weights
from attention_service.models.answers.context.context_costs import context_report
from attention_service.models.answers.context.context_plan import ContextPlan, plan_context
from attention_service.models.answers.context.context_run import ContextRun
from attention_service.models.answers.divided_questions import divided, may_divide
from attention_service.models.answers.joined_questions import group_of
from attention_service.models.answers.lenses.jacobian_rows import jacobian_rows, plan_rows
from attention_service.models.answers.lenses.lens_file import LensFile
from attention_service.models.answers.lenses.lens_plan import plan_lens
from attention_service.models.answers.lenses.lens_reply import LensRun
from attention_service.models.answers.lenses.residual_stream import ResidualStream, find_stream
from attention_service.models.answers.measured_runs import measured
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.answers.model_weights import weights_reply
from attention_service.models.answers.pair_similarity import (
    image_bytes,
    images_of,
    is_pair,
    pair_similarity_reply,
    plan_pair_similarity,
)
from attention_service.models.answers.paths.path_cost import path_cost
from attention_service.models.answers.paths.path_effects import EffectsOfPaths
from attention_service.models.answers.paths.path_models import check_stack
from attention_service.models.answers.sweeps.sweep_cost import sweep_cost
from attention_service.models.answers.sweeps.swept_effects import EffectsOfSweep
from attention_service.models.answers.text_embeddings import plan_embedding
from attention_service.models.answers.tokenized_inputs import characters, tokenize, tokenizing_bytes
from attention_service.models.answers.vector_parts import embeddings, similarities
from attention_service.models.answers.vector_similarity import plan_similarity
from attention_service.models.costs.answer_parts import BACKWARD, Passes
from attention_service.models.costs.implicit_costs import implicit_bytes
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.generation.decoder import Decoder
from attention_service.models.generation.generation import Generation
from attention_service.models.generation.generation_plan import GenerationPlan, GenerationRequest, plan_generation
from attention_service.models.generation.model_responses import chat_of, plan_response
from attention_service.models.generation.sampling import TextRequest
from attention_service.models.generation.transcription_plan import plan_transcription
from attention_service.models.inputs.field_names import fields_named
from attention_service.models.inputs.images.image_decoding import decoding_bytes, sized_bytes
from attention_service.models.inputs.long_texts import read_beside
from attention_service.models.inputs.sounds.sound_decoding import sound_bytes
from attention_service.models.loaded.checked_request import CheckedRequest, read_request
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.process.adapted_work import with_adapter
from attention_service.models.process.answered_contexts import generating, of_context
from attention_service.models.process.reply_writing import lines_of, written
from attention_service.models.process.served import Answer, Emit, Facts, Parts, PricedRun
from attention_service.models.process.timed_runs import TimedRuns


class ModelOperations:
    """The operations of one model: each reads a request, and returns the work that is to be admitted."""

    def __init__(self, loaded: LoadedModel, decoder: Decoder) -> None:
        self.loaded = loaded
        self.costs = ModelCosts(loaded)
        self.decoder = decoder
        self._stream: ResidualStream | None = None

    def prepare(self, operation: str, body: memoryview, facts: Facts, emit: Emit) -> PricedRun:
        """Read a request, check it, and return its work. Raises what the operation raises."""
        kind, prepare = OPERATIONS[operation]
        return prepare(self, None if kind is None else from_body(kind, body, JSON, "request"), facts, emit)

    def _forward(self, request: ModelForwardRequest, *_: object) -> PricedRun:
        return self._asking(request, forward_reply)

    def _weights(self, request: ModelWeightsRequest, *_: object) -> PricedRun:
        return self._asking(request, compared_weights if request.compare == "base" else weights_reply)

    def _gradients(self, request: ModelGradientsRequest, facts: Facts, _: Emit) -> PricedRun:

        def work() -> PricedRun:
            gradients = ModelGradients(self.loaded, request)
            checked, points = gradients.checked, 1
            if request.integrated is not None and gradients.joins:
                points = self.costs.memory.points_at_once(checked, request.integrated, facts["free_bytes"])
            need = self.costs.memory.needed_bytes(checked, request, points)
            kind = "gradients" if request.integrated is None and not request.check else "gradients of many passes"
            runs = TimedRuns(self.costs.pace, "gradients", kind)
            return self._in_parts(runs, checked, need, partial(gradients.parts, points), BACKWARD)

        return self._after_decoding(request, work)

    def _effects(self, request: ModelEffectsRequest, facts: Facts, _: Emit) -> PricedRun:

        def work() -> PricedRun:
            if request.from_ is None:
                return self._measured(EffectsOfSweep(self.loaded, request), request, facts)
            with fields_named(kind="from"):
                stream = self._residual_stream()
            return self._measured(EffectsOfPaths(self.loaded, request, stream), request, facts)

        if request.from_ is not None:
            check_stack(self.loaded)
            if self._stream is None and not request.all_images and not request.audio:
                return PricedRun(self.costs.memory.short_bytes, work)
        return self._after_decoding(request, work)

    def _measured(self, effects: EffectsOfSweep | EffectsOfPaths, body: ModelEffectsRequest, facts: Facts) -> PricedRun:
        """Measure effects pass by pass, as many copies of the texts in each as memory allows."""
        checked, sizes = effects.runs.checked, effects.sizes
        copies = self.costs.memory.copies_at_once(sizes, effects.copies, facts["free_bytes"])
        need = self.costs.memory.sweep_bytes(sizes, copies) + self.costs.memory.image_bytes(checked.inputs.media)
        need += self.loaded.reader.front_bytes(checked.inputs.arguments)
        need += implicit_bytes(self.loaded, checked, body)
        runs, first = TimedRuns(self.costs.pace, "effects"), effects.next_copies(copies)
        return self._in_parts(runs, checked, need, partial(measured, effects, copies), first)

    def _complexity(self, request: ModelComplexityRequest, facts: Facts, _: Emit) -> PricedRun:
        if request.context is not None:
            return PricedRun(0, lambda: Answer(context_report(self.loaded, self.costs, request, facts["free_bytes"])))
        needed = sized_bytes(request.images, self.loaded.reader.edge)

        def report() -> Answer:
            reply = self.costs.report(request, facts["free_bytes"])
            if request.sweep is not None or request.from_ is not None:
                priced = sweep_cost if request.from_ is None else path_cost
                cost = priced(self.loaded, self.costs, request, reply.prefill, facts["free_bytes"])
                reply = reply.model_copy(update={"sweep": cost})
            return Answer(reply)

        return PricedRun(needed, report)

    def _respond(self, request: ResponseRequest, facts: Facts, emit: Emit) -> PricedRun:
        chat = chat_of(request)

        def work() -> PricedRun:
            plan = plan_response(self.loaded, chat)
            return self._begins(request, plan, facts, emit, self.costs.memory.image_bytes(plan.vision))

        with fields_named(images="input", audio="input"):
            return self._after_media(images_in(chat.messages), sounds_in(chat.messages), work)

    def _tokenize(self, request: TokenizeRequest, facts: Facts, _: Emit) -> PricedRun:
        messages = request.messages or ()
        images, sounds = images_in(messages), sounds_in(messages)
        # Images and sounds are read by the model's own functions, which no thread beside the loop may call.
        beside = 0 if images or sounds else characters(request)

        def answer() -> Answer:
            reply = tokenize(self.loaded, request)
            return Answer(reply, written=written(reply, facts["form"], facts["encoding"]) if beside else None)

        def work() -> PricedRun:
            return PricedRun(tokenizing_bytes(request), partial(read_beside, "tokenize", beside, answer))

        with fields_named(images="messages", audio="messages"):
            return self._after_media(images, sounds, work)

    def _transcribe(self, request: TranscriptionRequest, facts: Facts, emit: Emit) -> PricedRun:
        reader = self.loaded.reader

        def work() -> PricedRun:
            plan = plan_transcription(self.loaded, request)
            heard = reader.front_bytes(plan.arguments) + self.costs.memory.image_bytes(plan.vision)
            return self._begins(request, plan, facts, emit, heard)

        if not reader.rate:
            return work()
        try:
            return PricedRun(sound_bytes([request.file], reader.rate), work)
        except InvalidRequest as fault:
            raise InvalidRequest(fault.detail.replace("audio.0", "file"), param="file", **fault.facts) from None

    def _context(self, request: ContextRequest, facts: Facts, _: Emit) -> PricedRun:
        adapter, free_bytes = self.loaded.adapters.active, facts["free_bytes"]
        plan = plan_context(self.loaded, request)
        if plan.answers:
            return of_context(ContextRun(self.loaded, self.costs, request, plan, free_bytes))

        def then(answered: ContextPlan) -> PricedRun:
            run = ContextRun(self.loaded, self.costs, request, answered, free_bytes)
            work = partial(of_context, run)
            return work() if adapter is None else with_adapter(self.loaded, adapter, work)

        return generating(self.decoder, self.costs, request, plan, facts, then)

    def _lens(self, request: ModelLensRequest, facts: Facts, _: Emit) -> PricedRun:
        file = None if facts.get("lens") is None else LensFile(Path(facts["lens"]))

        def work() -> PricedRun:
            plan = plan_lens(self.loaded, request, self._residual_stream(), file)
            need = self.costs.memory.needed_bytes(plan.checked, request) + plan.cost.peak_bytes
            runs = TimedRuns(self.costs.pace, "lens")
            return self._in_parts(runs, plan.checked, need, lambda: LensRun(self.loaded, plan).parts(), 1)

        if self._stream is None and not request.all_images and not request.audio:
            return PricedRun(self.costs.memory.short_bytes, work)
        return self._after_decoding(request, work)

    def _jacobian(self, request: JacobianRequest, facts: Facts, _: Emit) -> PricedRun:

        def work() -> PricedRun:
            stream = self._residual_stream()
            plan = plan_rows(self.loaded, request, stream, self.costs, facts["free_bytes"])
            texts, length = plan.stack.ids.shape
            need = self.costs.memory.graph_bytes(texts, length) + 8 * len(stream.layers) * texts * plan.width
            seconds = self.costs.seconds_of(texts, length, 3)
            return PricedRun(need, lambda: Answer(jacobian_rows(self.loaded, plan, stream)), seconds)

        return work() if self._stream is not None else PricedRun(self.costs.memory.short_bytes, work)

    def _residual_stream(self) -> ResidualStream:
        """The residual stream of the model, which short runs find at the first request."""
        if self._stream is None:
            with self.loaded.adapters.using(None):
                self._stream = find_stream(self.loaded)
        return self._stream

    def _similarity(self, request: TextSimilarityRequest, *_: object) -> PricedRun:
        if is_pair(self.loaded):
            work = partial(self._of_pair, request)
            return PricedRun(image_bytes(self.loaded, request), work) if images_of(request) else work()
        planned = plan_similarity(self.loaded, request)
        need, (texts, length) = planned.plan.needed_bytes(self.loaded), planned.stack.ids.shape
        need += self.costs.memory.graph_bytes(texts, length) if request.gradients else 0
        answer = partial(similarities, self.loaded, self.costs.memory, request, planned)
        return self._of_texts(need, answer, texts, length, BACKWARD if request.gradients else 1)

    def _of_pair(self, request: TextSimilarityRequest) -> PricedRun:
        planned = plan_pair_similarity(self.loaded, request)
        need = self.costs.memory.pair_bytes(*planned.lengths, graph=request.gradients)
        return PricedRun(need, lambda: Answer(pair_similarity_reply(self.loaded, request, planned)))

    def _embed(self, request: EmbeddingRequest, *_: object) -> PricedRun:
        plan = plan_embedding(self.loaded, request)
        answer = partial(embeddings, self.loaded, self.costs.memory, request, plan)
        return self._of_texts(plan.needed_bytes(self.loaded), answer, len(plan.rows), max(map(len, plan.rows)))

    def _adapt(self, *_: object) -> PricedRun:
        return PricedRun(0, Answer)  # its adapter is loaded by now

    def _forget(self, *_: object) -> PricedRun:
        if (adapter := self.loaded.adapters.active) is not None:
            self.loaded.adapters.forget(adapter.name)
        return PricedRun(0, Answer)

    def _begins(
        self, request: GenerationRequest, plan: GenerationPlan, facts: Facts, emit: Emit, more_bytes: int
    ) -> PricedRun:
        """The work that begins a planned generation; ``more_bytes``: for images or a sound."""
        run = partial(Generation, self.decoder, request, plan, lambda objects: emit(lines_of(objects)), facts["reader"])
        seconds = self.costs.seconds_of(1, plan.longest_pass)
        return PricedRun(plan.needed_bytes(self.loaded) + more_bytes, run, seconds, generates=True)

    def _generating(self, request: TextRequest, facts: Facts, emit: Emit) -> PricedRun:
        def work() -> PricedRun:
            plan = plan_generation(self.loaded, request)
            return self._begins(request, plan, facts, emit, self.costs.memory.image_bytes(plan.vision))

        if not isinstance(request, ChatCompletionRequest):
            return work()
        return self._after_media(images_in(request.messages), sounds_in(request.messages), work)

    def _after_decoding(self, request: ModelInput, work: Callable[[], PricedRun]) -> PricedRun:
        """The work of a question, which decodes its images and sounds only once their memory is admitted."""
        return self._after_media(request.all_images, request.all_audio, work)

    def _after_media(
        self, images: Sequence[ImageBytes], sounds: Sequence[AudioBytes], work: Callable[[], PricedRun]
    ) -> PricedRun:
        """The same of a request with these images and sounds."""
        reader = self.loaded.reader
        if sounds and reader.rate:
            return PricedRun(sound_bytes(sounds, reader.rate), work)
        return PricedRun(decoding_bytes(images, reader.edge), work) if images else work()

    def _in_parts(
        self, runs: TimedRuns, checked: CheckedRequest, need: int, answer: Callable[[], Passes[WireModel]], passes: int
    ) -> PricedRun:
        """The work of an answer in parts, the first of which takes so many passes over the input."""
        texts, length = len(checked.inputs.predicted.ids), _longest(checked)
        pass_ms = self.costs.pass_ms(texts, length, weights=passes == BACKWARD)

        def parts() -> Parts:
            timed = runs.parts(answer(), passes, pass_ms)
            return (yield from _timed(timed, partial(self.costs.silent_seconds, checked), runs))

        return PricedRun(need, parts, self.costs.silent_seconds(checked, passes))

    def _of_texts(
        self, need: int, answer: Callable[[], Passes[WireModel]], texts: int, length: int, passes: int = 1,
        runs: TimedRuns | None = None, text_ms: float = 0.0,
    ) -> PricedRun:  # fmt: skip
        """The work of an answer of many texts of at most so many tokens, some of them at a time.

        ``runs``: those that are predicted, at ``text_ms`` milliseconds a text.
        """
        first = min(texts, self.costs.memory.in_part(length, passes))

        def parts() -> Parts:
            timed = answer() if runs is None else runs.parts(answer(), first, text_ms)
            return (yield from _timed(timed, lambda passes: self.costs.seconds_of(1, length, passes), runs))

        return PricedRun(need, parts, self.costs.seconds_of(first, length, passes))

    def timed(self, request: ModelForwardRequest | ModelWeightsRequest) -> TimedRuns:
        """The times of the runs of a question about an input."""
        purpose: Computation = "weights" if isinstance(request, ModelWeightsRequest) else "forward"
        return TimedRuns(self.costs.pace, purpose)

    def question_ms(self, request: WireModel, checked: Sequence[CheckedRequest]) -> float:
        """Milliseconds of a pass that answers questions about these inputs, without what was learned."""
        weights = isinstance(request, ModelWeightsRequest)
        texts = sum(len(each.inputs.predicted.ids) for each in checked)
        return self.costs.pass_ms(texts, max(map(_longest, checked)), weights=weights)

    def _asking(self, request: Any, answer: Callable[[LoadedModel, Any, CheckedRequest], WireModel]) -> PricedRun:
        """The work of a question about an input, whose recording the model has afterwards."""

        def work() -> PricedRun:
            checked = read_request(self.loaded, request)
            beside = request.compare == "base"
            if beside and checked.adapter is None:
                raise InvalidRequest.at("compare", "base goes with an adapter: ask base:adapter, or name its adapter")

            def run() -> Answer:
                return Answer(answer(self.loaded, request, checked), self.loaded.take_recording())

            runs, predicted_ms = self.timed(request), (1 + beside) * self.question_ms(request, [checked])
            need = (1 + beside) * self.costs.memory.needed_bytes(checked, request)
            texts = len(checked.inputs.predicted.ids)
            if texts > 1 and may_divide(self.loaded, request, checked):
                length = _longest(checked)
                some = self.costs.memory.in_part(length, 1 + beside)
                if some < texts:
                    parts = partial(divided, self.loaded, request, checked, some, answer)
                    return self._of_texts(need, parts, texts, length, 1 + beside, runs, predicted_ms / texts)
            return PricedRun(
                need, lambda: runs.run(run, predicted_ms), self.costs.silent_seconds(checked, 1 + beside),
                group=group_of(self.loaded, request, checked), length=checked.inputs.text.length,
                question=(request, checked),
            )  # fmt: skip

        return self._after_decoding(request, work)


def _timed(answer: Passes[WireModel], seconds: Callable[[int], float], runs: TimedRuns | None = None) -> Parts:
    """An answer in parts, with the time of each in place of its passes."""
    while True:
        try:
            passes = next(answer)
        except StopIteration as end:
            found = Answer(end.value)
            return found if runs is None else runs.told([found])[0]
        yield seconds(passes)


def _longest(checked: CheckedRequest) -> int:
    return max(checked.inputs.predicted.length, checked.inputs.text.length)


OPERATIONS: Final[
    dict[str, tuple[type[WireModel] | None, Callable[[ModelOperations, Any, Facts, Emit], PricedRun]]]
] = {
    "forward": (ModelForwardRequest, ModelOperations._forward),
    "weights": (ModelWeightsRequest, ModelOperations._weights),
    "gradients": (ModelGradientsRequest, ModelOperations._gradients),
    "effects": (ModelEffectsRequest, ModelOperations._effects),
    "complexity": (ModelComplexityRequest, ModelOperations._complexity),
    "chat": (ChatCompletionRequest, ModelOperations._generating),
    "complete": (CompletionRequest, ModelOperations._generating),
    "respond": (ResponseRequest, ModelOperations._respond),
    "tokenize": (TokenizeRequest, ModelOperations._tokenize),
    "embed": (EmbeddingRequest, ModelOperations._embed),
    "context": (ContextRequest, ModelOperations._context),
    "lens": (ModelLensRequest, ModelOperations._lens),
    "jacobian": (JacobianRequest, ModelOperations._jacobian),
    "similarity": (TextSimilarityRequest, ModelOperations._similarity),
    "transcribe": (TranscriptionRequest, ModelOperations._transcribe),
    "adapt": (None, ModelOperations._adapt),
    "forget": (None, ModelOperations._forget),
}
"""The request of each operation, None if it has no fields of its own, and the preparation of its work."""
