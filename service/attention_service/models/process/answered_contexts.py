"""Requests for the sources of an answer, in the turns of a process: the answer is generated first if none is given."""

from collections.abc import Callable, Sequence
from functools import partial

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.context import ContextRequest
from attention_contract.schemas.openai import CompletionRequest, DrawOptions
from attention_service.models.answers.context.context_costs import new_tokens, stages_of
from attention_service.models.answers.context.context_plan import ContextPlan, plan_context
from attention_service.models.answers.context.context_run import ContextRun
from attention_service.models.costs.question_stages import Stage, held
from attention_service.models.generation.decoding.decoder import Decoder
from attention_service.models.generation.decoding.generated_text import GeneratedText, PlacedToken
from attention_service.models.generation.decoding.sampling import Sampling
from attention_service.models.generation.generation import RunningGeneration
from attention_service.models.generation.plans.generation_plan import GenerationPlan, plan_generation
from attention_service.models.inputs.token_texts import TokenDecoder
from attention_service.models.process.priced_questions import AskedModel
from attention_service.models.process.served import Answer, Facts, Parts, PricedRun
from attention_service.models.process.work_blocks import with_adapter

Then = Callable[[ContextPlan], PricedRun]
"""The work that follows an answer."""


class AnswerGeneration(RunningGeneration):
    """A generation whose text is the answer that a request for sources is about."""

    def __init__(
        self, decoder: Decoder, request: CompletionRequest, plan: GenerationPlan, context: ContextPlan, then: Then,
        reader: str,
    ) -> None:  # fmt: skip
        super().__init__(decoder, request, plan, lambda _: None, reader)
        self._context, self._then, self._ends, self._sampling = context, then, plan.ends, plan.sampling

    def then(self) -> PricedRun:
        """Return the work about the answer. Raises InvalidRequest for one without a token."""
        prompt = self._context.inputs.text.ids[0].tolist()
        ids = self.first[len(prompt) :]
        decoder = self._loaded.reader.decoder
        if ids and ids[-1] in self._ends and not decoder.decode(ids[-1:]):
            ids = ids[:-1]
        answer, ends = _text_of(decoder, prompt, ids, self._sampling)
        if not ends:
            raise InvalidRequest.at("answer", "the model ends its answer before a first word; send one")
        return self._then(self._context.answered(self._loaded, ids[: len(ends)], ends, answer))


def _text_of(
    decoder: TokenDecoder, prompt: Sequence[int], ids: Sequence[int], sampling: Sampling
) -> tuple[str, list[int]]:  # fmt: skip
    """A generated text before the stop text that ended it, and its characters up to each of its tokens.

    A part of a character ends with it.
    """
    generated = GeneratedText(decoder, prompt, sampling.stops, sampling.least_tokens)
    text, places = "", list[PlacedToken]()
    for token in ids:
        text += generated.add(token)
        places.append(generated.last)
    text += generated.rest()
    if not text:
        return "", []
    places[-1] = generated.last
    if generated.stopped:
        places = [place for place in places if place.begin < len(text)]
    return text, [min(place.end, len(text)) for place in places]


def context(model: AskedModel, request: ContextRequest, facts: Facts, *_: object) -> PricedRun:
    """The work of a request for sources. Raises InvalidRequest that names the field at fault."""
    loaded, costs, free_bytes = model.loaded, model.costs, facts["free_bytes"]
    adapter, plan = loaded.adapters.active, plan_context(loaded, request)

    def then(answered: ContextPlan) -> PricedRun:
        run = ContextRun(loaded, costs, request, answered, free_bytes)

        def parts() -> Parts:
            return Answer((yield from run.parts()))

        return PricedRun(held(run.stages), parts, run.seconds(run.stages[0]))

    def later(answered: ContextPlan) -> PricedRun:
        work = partial(then, answered)
        return work() if adapter is None else with_adapter(loaded, adapter, work)

    return then(plan) if plan.answers else _generating(model, request, plan, facts, later)


def _generating(
    model: AskedModel, request: ContextRequest, context: ContextPlan, facts: Facts, then: Then
) -> PricedRun:
    """The work that generates the answer first."""
    loaded, costs = model.loaded, model.costs
    completion = CompletionRequest.model_validate(
        {name: getattr(request, name) for name in ("temperature", *DrawOptions.model_fields)}
        | {
            "model": loaded.name,
            "prompt": context.inputs.text.ids[0].tolist(),
            "max_tokens": new_tokens(loaded, request, context),
            "alone": request.alone,
        }
    )
    try:
        plan = plan_generation(loaded, completion)
    except InvalidRequest as fault:
        if fault.param != "prompt":
            raise
        field = "text" if request.messages is None else "messages"
        raise InvalidRequest(fault.detail.replace("prompt", field, 1), param=field, **fault.facts) from None
    reading = Stage(1, plan.longest_pass, peak_bytes=plan.needed_bytes(loaded))
    later = stages_of(loaded, costs, request, context, facts["free_bytes"])

    def run() -> AnswerGeneration:
        return AnswerGeneration(model.decoder, completion, plan, context, then, facts["reader"])

    return PricedRun(held([reading, *later]), run, costs.seconds(reading), generates=True)
