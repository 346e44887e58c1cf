"""A model as the requests of its process ask it: the work of each question, checked, with its stages, and not begun."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from attention_contract.base import WireModel
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.lenses import JacobianRequest, ModelLensRequest
from attention_contract.schemas.analyses.model_effects import ModelEffectsRequest
from attention_contract.schemas.analyses.probes import FeaturesRequest
from attention_contract.schemas.analyses.vectors import StatesRequest
from attention_contract.schemas.costs.accuracy import Computation
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest, ModelWeightsRequest
from attention_contract.schemas.openai import EmbeddingRequest
from attention_contract.schemas.openai_api.scoring import RerankRequest, ScoreRequest
from attention_contract.schemas.text_similarity import TextSimilarityRequest
from attention_service.models.answers.base_comparison import compared_weights
from attention_service.models.answers.divided_questions import AnswerTexts, divided, may_divide
from attention_service.models.answers.embeddings.pair_scores import plan_scoring, scored
from attention_service.models.answers.embeddings.pair_similarity import (
    image_bytes,
    images_of,
    is_pair,
    pair_similarity_reply,
    plan_pair_similarity,
)
from attention_service.models.answers.embeddings.text_embeddings import EmbeddingPlan, plan_embedding
from attention_service.models.answers.embeddings.vector_parts import embeddings, similarities
from attention_service.models.answers.embeddings.vector_similarity import plan_similarity
from attention_service.models.answers.joined_questions import Question, group_of, joined_replies
from attention_service.models.answers.lenses.jacobian_rows import jacobian_rows, plan_rows
from attention_service.models.answers.lenses.lens_file import LensFile
from attention_service.models.answers.lenses.lens_plan import plan_lens
from attention_service.models.answers.lenses.lens_reply import LensRun
from attention_service.models.answers.masked_likelihoods import masked_likelihoods, plan_likelihoods
from attention_service.models.answers.model_forward import recorded_forward
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.answers.model_weights import recorded_weights
from attention_service.models.answers.paths.path_effects import EffectsOfPaths
from attention_service.models.answers.paths.path_models import check_stack
from attention_service.models.answers.probes.fit_costs import features_stage, states_stage
from attention_service.models.answers.probes.text_states import plan_states, states_reply
from attention_service.models.answers.probes.token_features import features_reply, plan_features
from attention_service.models.answers.sweeps.swept_effects import EffectsOfSweep
from attention_service.models.costs.answer_parts import BACKWARD, Passes
from attention_service.models.costs.masked_passes import masked_stage
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.costs.question_stages import (
    Stage,
    held,
    input_stage,
    lens_stages,
    rows_stage,
    sweep_stage,
)
from attention_service.models.generation.decoding.decoder import Decoder
from attention_service.models.inputs.field_names import fields_named
from attention_service.models.loaded.checked_request import CheckedRequest, read_request
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.streams.residual_stream import ResidualStream
from attention_service.models.loaded.streams.stream_search import find_stream
from attention_service.models.loaded.streams.watched_probes import watched_probes
from attention_service.models.process.finite_answers import check_finite
from attention_service.models.process.served import Answer, Facts, PricedRun
from attention_service.models.process.timed_runs import TimedRuns

_BASELINE: Final = 2
"""The most passes of the part in which effects have their baseline: with the search for the token that is measured."""


class AskedModel:
    """A model, and the costs of questions to it."""

    def __init__(self, loaded: LoadedModel, decoder: Decoder) -> None:
        self.loaded, self.decoder = loaded, decoder
        self.costs = ModelCosts(loaded)
        self._stream: ResidualStream | None = None

    def stream(self) -> ResidualStream:
        """The residual stream of the model, which short runs find at the first request."""
        if self._stream is None:
            with self.loaded.adapters.using(None):
                self._stream = find_stream(self.loaded)
        return self._stream

    def with_stream(self, work: Callable[[ResidualStream], PricedRun], param: str = "kind") -> PricedRun:
        """The work of a question about the residual stream; ``param``: its field that a refusal names."""

        def run() -> PricedRun:
            with fields_named(kind=param):
                stream = self.stream()
            return work(stream)

        return PricedRun(self.costs.memory.short_bytes, run) if self._stream is None else run()

    def in_parts(
        self, stages: Sequence[Stage], answer: Callable[[], Passes[WireModel]], first: int = 1,
        purpose: Computation | None = None, kind: str = "",
    ) -> PricedRun:  # fmt: skip
        """The work of an answer in parts, of passes of its first stage; ``first``: those of the first part.

        ``purpose``: of the times that are learned; None for none. ``kind``: as of ``TimedRuns``.
        """
        runs = TimedRuns(self.costs, stages[0], purpose, kind)
        return PricedRun(held(stages), lambda: runs.parts(answer(), first), runs.seconds(first))

    def at_once(self, stage: Stage, answer: Callable[[], WireModel]) -> PricedRun:
        """The work of an answer in one part, of which no times are learned."""
        return PricedRun(stage.peak_bytes, lambda: Answer(answer()), self.costs.seconds(stage))


def forward(model: AskedModel, request: ModelForwardRequest, facts: Facts, *_: object) -> PricedRun:
    """The work of a request for predictions and taps, or for likelihoods."""
    if request.likelihood is not None:
        return _likelihoods(model, request)
    return _one_pass(model, request, _watched(model, request, facts), recorded_forward)


def _watched(model: AskedModel, request: ModelForwardRequest | ModelWeightsRequest, facts: Facts) -> CheckedRequest:
    """Read a request, with the probes that score its tokens. Raises InvalidRequest."""
    checked = read_request(model.loaded, request)
    if not request.watch:
        return checked
    return replace(checked, watch=watched_probes(model.loaded, request.watch, facts["probes"], "watch"))


def _likelihoods(model: AskedModel, request: ModelForwardRequest) -> PricedRun:
    """The work of likelihoods of texts, some masked copies of them at a time."""
    plan = plan_likelihoods(model.loaded, request)
    stage = masked_stage(model.loaded, model.costs.memory, len(plan.copies), plan.checked.inputs.text.length)
    answer = partial(masked_likelihoods, model.loaded, plan, stage.texts)
    return model.in_parts([stage], answer, stage.texts, "forward", "likelihood")


def weights(model: AskedModel, request: ModelWeightsRequest, facts: Facts, *_: object) -> PricedRun:
    """The work of a request for weights."""
    checked = _watched(model, request, facts) if request.watch else read_request(model.loaded, request)
    return _one_pass(model, request, checked, compared_weights if request.compare == "base" else recorded_weights)


def _one_pass(model: AskedModel, request: Any, checked: CheckedRequest, answer: AnswerTexts) -> PricedRun:
    """The work of a question about an input."""
    loaded, costs, purpose = model.loaded, model.costs, _purpose(request)
    stage = input_stage(costs.memory, checked, request)
    if request.compare == "base":
        if checked.adapter is None:
            raise InvalidRequest.at("compare", "base goes with an adapter: ask base:adapter, or name its adapter")
        stage = replace(stage, times=2, peak_bytes=2 * stage.peak_bytes)
    if stage.texts > 1 and may_divide(loaded, request, checked):
        some = costs.memory.in_part(stage.length, int(stage.times))
        if some < stage.texts:
            parts = partial(divided, loaded, request, checked, some, answer)
            return model.in_parts([replace(stage, texts=some, counted=some)], parts, some, purpose)
    runs = TimedRuns(costs, stage, purpose)

    def run() -> Answer:
        made = runs.run(lambda: answer(loaded, request, checked))
        return runs.told([Answer(made.reply, made.recording)])[0]

    return PricedRun(
        stage.peak_bytes, run, runs.seconds(1),
        group=group_of(loaded, request, checked), length=checked.inputs.text.length, question=(request, checked),
    )  # fmt: skip


def joined(model: AskedModel, questions: Sequence[Question]) -> list[Answer]:
    """Answer questions of one group by one pass."""
    request, checked = questions[0][0], [asked for _, asked in questions]
    texts = sum(len(asked.inputs.predicted.ids) for asked in checked)
    length = max(asked.inputs.text.length for asked in checked)
    targets = [asked.inputs.target.length for asked in checked if asked.inputs.target is not None]
    shared = Stage(texts, length, max(targets, default=None), weights=isinstance(request, ModelWeightsRequest))
    runs = TimedRuns(model.costs, shared, _purpose(request))
    replies = runs.run(lambda: joined_replies(model.loaded, questions))
    for reply in replies:
        check_finite(reply)  # each question is then answered alone
    return runs.told([Answer(reply) for reply in replies])


def _purpose(request: WireModel) -> Computation:
    return "weights" if isinstance(request, ModelWeightsRequest) else "forward"


def gradients(model: AskedModel, request: ModelGradientsRequest, facts: Facts, *_: object) -> PricedRun:
    """The work of a request for gradients."""
    differentiated, memory, points = ModelGradients(model.loaded, request), model.costs.memory, 1
    if request.path is not None and differentiated.joins:
        points = memory.points_at_once(differentiated.checked, request.path.steps, facts["free_bytes"])
    stage = input_stage(memory, differentiated.checked, request, points)
    kind = "gradients" if request.integrated is None and not request.check else "gradients of many passes"
    return model.in_parts([stage], partial(differentiated.parts, points), BACKWARD, "gradients", kind)


def effects(model: AskedModel, request: ModelEffectsRequest, facts: Facts, *_: object) -> PricedRun:
    """The work of a request for effects of a sweep of edits, or of paths."""
    if request.from_ is None:
        return _measured(model, request, facts, EffectsOfSweep(model.loaded, request))
    check_stack(model.loaded)
    return model.with_stream(
        lambda stream: _measured(model, request, facts, EffectsOfPaths(model.loaded, request, stream)), "from"
    )


def _measured(
    model: AskedModel, request: ModelEffectsRequest, facts: Facts, measurement: EffectsOfSweep | EffectsOfPaths
) -> PricedRun:  # fmt: skip
    """The work of effects, pass by pass, as many copies of the texts in each as memory allows."""
    memory = model.costs.memory
    sizes = measurement.sizes._replace(beside_bytes=memory.beside_bytes(measurement.runs.checked, request))
    copies = memory.copies_at_once(sizes, measurement.copies, facts["free_bytes"])
    stage = sweep_stage(memory, sizes, copies)
    return model.in_parts([stage], partial(measurement.parts, copies), _BASELINE, "effects")


def lens(model: AskedModel, request: ModelLensRequest, facts: Facts, *_: object) -> PricedRun:
    """The work of a request for the readings of a lens."""
    file = None if facts.get("lens") is None else LensFile(Path(facts["lens"]))

    def work(stream: ResidualStream) -> PricedRun:
        plan = plan_lens(model.loaded, request, stream, file)
        stages = lens_stages(input_stage(model.costs.memory, plan.checked, request), plan.cost)
        return model.in_parts(stages, LensRun(model.loaded, plan).parts, 1, "lens")

    return model.with_stream(work)


def jacobian(model: AskedModel, request: JacobianRequest, facts: Facts, *_: object) -> PricedRun:
    """The work of a request for rows of Jacobians."""

    def work(stream: ResidualStream) -> PricedRun:
        plan = plan_rows(model.loaded, request, stream, model.costs, facts["free_bytes"])
        stage = rows_stage(model.costs.memory, len(plan.rows), plan.stack.length)
        return model.at_once(stage, partial(jacobian_rows, model.loaded, plan, stream))

    return model.with_stream(work)


def features(model: AskedModel, request: FeaturesRequest, *_: object) -> PricedRun:
    """The work of a request for features of tokens."""
    plan = plan_features(model.loaded, request)
    return model.at_once(features_stage(model.costs.memory, plan), partial(features_reply, model.loaded, plan))


def states(model: AskedModel, request: StatesRequest, *_: object) -> PricedRun:
    """The work of a request for states of layers behind a text."""
    plan = plan_states(model.loaded, request)
    return model.at_once(states_stage(model.costs.memory, plan), partial(states_reply, model.loaded, plan))


def embed(model: AskedModel, request: EmbeddingRequest, *_: object) -> PricedRun:
    """The work of a request for vectors of texts."""
    loaded, memory, plan = model.loaded, model.costs.memory, plan_embedding(model.loaded, request)
    return _of_texts(model, plan, partial(embeddings, loaded, memory, request, plan))


def scores(model: AskedModel, request: RerankRequest | ScoreRequest, *_: object) -> PricedRun:
    """The work of a request for scores of pairs of texts, some of them at a time."""
    loaded, memory = model.loaded, model.costs.memory
    plan = plan_scoring(loaded, request)
    answer = partial(scored, loaded, memory, request, plan)
    if plan.embedding is not None:
        return _of_texts(model, plan.embedding, answer)
    texts, length = len(plan.rows), max(plan.lengths)
    some = min(texts, memory.in_part(length))
    return model.in_parts(
        [Stage(some, length, peak_bytes=memory.rows_bytes(some, length, 1), counted=some)], answer, some
    )


def similarity(model: AskedModel, request: TextSimilarityRequest, *_: object) -> PricedRun:
    """The work of a request for similarities."""
    loaded, memory = model.loaded, model.costs.memory
    if is_pair(loaded):
        work = partial(_of_pair, model, request)
        return PricedRun(image_bytes(loaded, request), work) if images_of(request) else work()
    plan = plan_similarity(loaded, request)
    return _of_texts(model, plan, partial(similarities, loaded, memory, request, plan), graph=request.gradients)


def _of_texts(
    model: AskedModel, plan: EmbeddingPlan, answer: Callable[[], Passes[WireModel]], *, graph: bool = False
) -> PricedRun:
    """The work of vectors of many texts, some of them at a time."""
    memory, texts, length = model.costs.memory, len(plan.rows), max(map(len, plan.rows))
    need = plan.needed_bytes(model.loaded) + (memory.graph_bytes(texts, length) if graph else 0)
    times = BACKWARD if graph else 1
    some = min(texts, memory.in_part(length, times))
    return model.in_parts(
        [Stage(some, length, peak_bytes=need, times=times, counted=times * some)], answer, times * some
    )


def _of_pair(model: AskedModel, request: TextSimilarityRequest) -> PricedRun:
    planned = plan_pair_similarity(model.loaded, request)
    need = model.costs.memory.pair_bytes(*planned.lengths, graph=request.gradients)
    return PricedRun(need, lambda: Answer(pair_similarity_reply(model.loaded, request, planned)))
