"""The operations of a whole model: the request of each, the images and sounds in it, and the work that it is."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

from attention_contract.base import WireModel
from attention_contract.schemas.analyses.context import ContextRequest
from attention_contract.schemas.analyses.lenses import JacobianRequest, ModelLensRequest
from attention_contract.schemas.analyses.model_effects import ModelEffectsRequest
from attention_contract.schemas.analyses.probes import FeaturesRequest
from attention_contract.schemas.analyses.vectors import StatesRequest
from attention_contract.schemas.costs.model_complexity import ModelComplexityRequest, PassCost
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest, ModelWeightsRequest
from attention_contract.schemas.openai import ChatCompletionRequest, CompletionRequest, EmbeddingRequest
from attention_contract.schemas.openai_api.responses import ResponseRequest
from attention_contract.schemas.openai_api.scoring import RerankRequest, ScoreRequest
from attention_contract.schemas.openai_api.tokenization import TokenizeRequest
from attention_contract.schemas.openai_api.transcriptions import TranscriptionRequest
from attention_contract.schemas.prompts import AudioBytes, ImageBytes, images_in, sounds_in
from attention_contract.schemas.text_similarity import TextSimilarityRequest
from attention_contract.wire import JSON, from_body
from attention_service.models.answers.context.context_costs import context_report
from attention_service.models.answers.lenses.jacobian_rows import lens_fit_cost
from attention_service.models.answers.paths.path_cost import path_cost
from attention_service.models.answers.probes.fit_costs import probe_cost, vector_cost
from attention_service.models.answers.sweeps.sweep_cost import sweep_cost
from attention_service.models.answers.tokenized_inputs import characters, tokenize, tokenizing_bytes
from attention_service.models.costs.model_costs import check_counts
from attention_service.models.costs.question_stages import Stage
from attention_service.models.generation.generation import RunningGeneration
from attention_service.models.generation.plans.generation_plan import GenerationPlan, plan_generation
from attention_service.models.generation.plans.response_plan import chat_of, plan_response
from attention_service.models.generation.plans.transcription_plan import plan_transcription
from attention_service.models.generation.plans.watched_plan import watch_of
from attention_service.models.inputs.field_names import fields_named
from attention_service.models.inputs.images.image_decoding import decoding_bytes, sized_bytes
from attention_service.models.inputs.long_texts import read_beside
from attention_service.models.inputs.sounds.sound_decoding import sound_bytes
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.streams.added_vectors import AddedVectors
from attention_service.models.loaded.streams.residual_stream import ResidualStream
from attention_service.models.process import priced_questions as questions
from attention_service.models.process.answered_contexts import context
from attention_service.models.process.priced_questions import AskedModel
from attention_service.models.process.reply_writing import lines_of, written
from attention_service.models.process.served import Answer, Emit, Facts, PricedRun

Work = Callable[[AskedModel, Any, Facts, Emit], PricedRun]
"""Checks a request, and returns the work that it is."""


class Media(NamedTuple):
    """The images and sounds of a request, which are decoded once their memory is admitted."""

    images: Sequence[ImageBytes]
    sounds: Sequence[AudioBytes]
    fields: Mapping[str, str] = {}
    """The fields of the request that they are, as ``fields_named`` takes them."""


class ModelOperation(NamedTuple):
    """One operation of a model."""

    request: type[WireModel] | None
    """None if it has no fields of its own."""
    work: Work
    media: Callable[[Any], Media] = lambda _: Media((), ())


def prepare(model: AskedModel, operation: str, body: memoryview, facts: Facts, emit: Emit) -> PricedRun:
    """Read a request, check it, and return its work. Raises what the operation raises."""
    kind, begin, media = OPERATIONS[operation]
    request = None if kind is None else from_body(kind, body, JSON, "request")
    if request is not None and (files := facts.get("vectors")):
        request = AddedVectors(files).within(request)
    work = partial(begin, model, request, facts, emit)
    images, sounds, fields = media(request)
    if not (images or sounds):
        return work()
    reader = model.loaded.reader
    with fields_named(**fields):
        if sounds and reader.rate:
            return PricedRun(sound_bytes(sounds, reader.rate), work)
        return PricedRun(decoding_bytes(images, reader.edge), work) if images else work()


def _complexity(model: AskedModel, request: ModelComplexityRequest, facts: Facts, _: Emit) -> PricedRun:
    if request.fit:
        return model.with_stream(lambda stream: _cost(model, request, facts, stream), "fit")
    return _cost(model, request, facts, None)


def _cost(
    model: AskedModel, request: ModelComplexityRequest, facts: Facts, stream: ResidualStream | None
) -> PricedRun:  # fmt: skip
    """The work of a question about costs. ``stream``: for the fit of a lens."""
    loaded, costs, free_bytes = model.loaded, model.costs, facts["free_bytes"]

    def report() -> Answer:
        if request.context is not None:
            return Answer(context_report(loaded, costs, request, free_bytes))
        more: dict[str, PassCost] = {}
        if stream is not None:
            more["fit"] = lens_fit_cost(loaded, stream, costs, request.batch, request.length, free_bytes)
        if request.vector is not None:
            more["vector"] = vector_cost(loaded, costs, request, request.vector)
        if request.probe is not None:
            more["probe"] = probe_cost(loaded, costs, request, request.probe, facts.get("vectors", {}))
        reply = costs.report(request, free_bytes)
        if request.sweep is not None:
            more["sweep"] = sweep_cost(loaded, costs, request, request.sweep, free_bytes)
        if request.from_ is not None:
            more["sweep"] = path_cost(loaded, costs, request, request.from_, free_bytes)
        return Answer(check_counts(request, reply.model_copy(update=more)))

    return PricedRun(sized_bytes(request.images, loaded.reader.edge), report)


def _generation(plan_of: Callable[[LoadedModel, Any], GenerationPlan]) -> Work:
    """The work that begins a generation."""

    def work(model: AskedModel, request: Any, facts: Facts, emit: Emit) -> PricedRun:
        loaded, memory, plan = model.loaded, model.costs.memory, plan_of(model.loaded, request)
        if request.attention is not None and request.attention.watch:
            watch = watch_of(loaded, request.attention, facts["probes"], plan.sampling.new_tokens)
            plan = replace(plan, watch=watch)
        need = plan.needed_bytes(loaded) + memory.image_bytes(plan.vision)
        need += loaded.reader.front_bytes(plan.arguments) if plan.arguments else 0

        def run() -> RunningGeneration:
            return RunningGeneration(model.decoder, request, plan, lambda told: emit(lines_of(told)), facts["reader"])

        stage = Stage(1, plan.longest_pass, peak_bytes=need)
        return PricedRun(stage.peak_bytes, run, model.costs.seconds(stage), generates=True)

    return work


def _tokenize(model: AskedModel, request: TokenizeRequest, facts: Facts, _: Emit) -> PricedRun:
    messages = request.messages or ()
    # Images and sounds are read by the model's own functions, which no thread beside the loop may call.
    beside = 0 if images_in(messages) or sounds_in(messages) else characters(request)

    def answer() -> Answer:
        reply = tokenize(model.loaded, request)
        return Answer(reply, written=written(reply, facts["form"], facts["encoding"]) if beside else None)

    return PricedRun(tokenizing_bytes(request), partial(read_beside, "tokenize", beside, answer))


def _adapt(*_: object) -> PricedRun:
    return PricedRun(0, Answer)  # its adapter is loaded by now


def _forget(model: AskedModel, *_: object) -> PricedRun:
    if (adapter := model.loaded.adapters.active) is not None:
        model.loaded.adapters.forget(adapter.name)
    return PricedRun(0, Answer)


def _of_input(request: Any) -> Media:
    return Media(request.all_images, request.all_audio)


def _of_messages(request: Any, **fields: str) -> Media:
    messages = request.messages or ()
    return Media(images_in(messages), sounds_in(messages), fields)


OPERATIONS: Final = {
    "forward": ModelOperation(ModelForwardRequest, questions.forward, _of_input),
    "weights": ModelOperation(ModelWeightsRequest, questions.weights, _of_input),
    "gradients": ModelOperation(ModelGradientsRequest, questions.gradients, _of_input),
    "effects": ModelOperation(ModelEffectsRequest, questions.effects, _of_input),
    "complexity": ModelOperation(ModelComplexityRequest, _complexity),
    "chat": ModelOperation(ChatCompletionRequest, _generation(plan_generation), _of_messages),
    "complete": ModelOperation(CompletionRequest, _generation(plan_generation)),
    "respond": ModelOperation(
        ResponseRequest, _generation(lambda loaded, request: plan_response(loaded, chat_of(request))),
        lambda request: _of_messages(chat_of(request), images="input", audio="input"),
    ),
    "tokenize": ModelOperation(TokenizeRequest, _tokenize, partial(_of_messages, images="messages", audio="messages")),
    "embed": ModelOperation(EmbeddingRequest, questions.embed),
    "rerank": ModelOperation(RerankRequest, questions.scores),
    "score": ModelOperation(ScoreRequest, questions.scores),
    "context": ModelOperation(ContextRequest, context),
    "lens": ModelOperation(ModelLensRequest, questions.lens, _of_input),
    "jacobian": ModelOperation(JacobianRequest, questions.jacobian),
    "features": ModelOperation(FeaturesRequest, questions.features),
    "states": ModelOperation(StatesRequest, questions.states),
    "similarity": ModelOperation(TextSimilarityRequest, questions.similarity),
    "transcribe": ModelOperation(
        TranscriptionRequest, _generation(plan_transcription),
        lambda request: Media((), [request.file], {"audio.0": "file"}),
    ),
    "adapt": ModelOperation(None, _adapt),
    "forget": ModelOperation(None, _forget),
}  # fmt: skip
"""The operations by their names."""
