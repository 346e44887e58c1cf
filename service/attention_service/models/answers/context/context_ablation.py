"""The log-probability of an answer without a source: hidden in all layers, or left out. Several are rows of a pass."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attention_contract.schemas.attention import Edit
from attention_service.models.answers.context.context_plan import ContextPlan
from attention_service.models.answers.given_answers import answer_logs, answer_places
from attention_service.models.inputs.input_stacks import Inputs, Tokens
from attention_service.models.loaded.checked_request import TEXT_ARGUMENTS
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import model_info
from attention_service.models.loaded.model_runner import Predictions, RunSpec
from attention_service.models.passes.attention_pass import AttentionPass, LayerTask
from attention_transformers.model_layers import LayerKey


def joins(loaded: LoadedModel, plan: ContextPlan) -> bool:
    """Return True if prompts without a source can be rows of one pass.

    No trial has shown that texts of an observed attention do not change each other, nor that layers which mix tokens
    without keys pass over padding.
    """
    if loaded.implicit or model_info(loaded)["unseen"] or loaded.reader.mixes_padding(plan.inputs.text.length):
        return False
    computed = loaded.attention.way == "computed" and not set(plan.inputs.arguments) - TEXT_ARGUMENTS
    return computed and all(place.keys_of == "tokens" for place in plan.places)


def sentence_logs(plan: ContextPlan, logs: Tensor) -> Tensor:
    """The log-probability ``[A]`` of each sentence, by those ``[T]`` of the tokens."""
    return torch.stack([logs[sentence.tokens.start : sentence.tokens.stop].sum() for sentence in plan.sentences])


def logs_of(loaded: LoadedModel, inputs: Inputs, attention_pass: AttentionPass) -> list[Tensor]:
    """Run texts, and return the log-probabilities ``[T]`` of their answers."""
    ids = [[row[at] for at in own] for row, own in zip(inputs.text.ids.tolist(), inputs.answers, strict=True)]
    spec = RunSpec(attention_pass, logits=Predictions(answer_places(inputs), inputs.text))
    return answer_logs(loaded.runner.run(inputs.arguments, spec).logits.logits, ids)


@torch.no_grad()
def hidden_logs(
    loaded: LoadedModel, plan: ContextPlan, sources: Sequence[int], attention_pass: AttentionPass
) -> Tensor:
    """The log-probabilities ``[sources, A]`` of the sentences if no query sees the keys of a source, in any layer."""
    inputs, many = plan.inputs, len(sources)
    stack = inputs.text.repeated(many)
    arguments = {name: torch.cat([x] * many) for name, x in inputs.arguments.items()}
    attention_pass.tasks = _hiding(loaded, plan, sources)
    logs = logs_of(loaded, Inputs(several=True, text=stack, target=None, arguments=arguments), attention_pass)
    return torch.stack([sentence_logs(plan, logs_of_text) for logs_of_text in logs])


@torch.no_grad()
def removed_logs(
    loaded: LoadedModel, plan: ContextPlan, sources: Sequence[int], attention_pass: AttentionPass
) -> Tensor:
    """The log-probabilities ``[sources, A]`` of the sentences behind the prompt without the tokens of a source."""
    text = plan.inputs.text
    ids, parts = text.ids[0].tolist(), (text.parts or [[]])[0]
    rows = []
    for source in sources:
        out = plan.sources[source].tokens
        kept = [at for at in range(len(ids)) if at not in out]
        rows.append(Tokens([ids[at] for at in kept], [None] * len(kept), [parts[at] for at in kept]))
    stack = loaded.reader.batch(rows)
    inputs = Inputs(several=True, text=stack, target=None, arguments=loaded.reader.arguments(stack))
    return torch.stack([sentence_logs(plan, logs_of_text) for logs_of_text in logs_of(loaded, inputs, attention_pass)])


def _hiding(loaded: LoadedModel, plan: ContextPlan, sources: Sequence[int]) -> dict[LayerKey, LayerTask]:
    """The tasks that hide the keys of a source in each row: they count as padding; where weights are seen, as 0."""
    if loaded.attention.way == "observed":
        [source] = sources
        keys = [*plan.sources[source].tokens]
        edits = [Edit(tap="weights", keys=keys, set=0.0, renormalize=True)]
        return {place.key: LayerTask(edits=edits) for place in plan.places}
    seen = torch.ones(len(sources), plan.length, dtype=torch.bool, device=loaded.model.device)
    for row, source in enumerate(sources):
        tokens = plan.sources[source].tokens
        seen[row, tokens.start : tokens.stop] = False
    return {place.key: LayerTask(key_mask=seen) for place in plan.places}
