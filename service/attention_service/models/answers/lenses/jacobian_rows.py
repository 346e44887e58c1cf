"""Rows of the Jacobians of a model's last hidden states by those of each layer, exact, by reverse mode.

Of each text J = mean over tokens t of Σ over tokens t′ of ∂h_last[t′]/∂h_layer[t], where t and t′ are the tokens behind
the first ones that are left out, but for the last. The texts of one pass are copies, each differentiated for one row.
Source: Gurnee et al. 2026, Verbalizable representations form a global workspace in language models.
"""

from dataclasses import dataclass, replace

import torch

from attention_contract.base import valid
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.lenses import JacobianReply, JacobianRequest
from attention_contract.schemas.costs.model_complexity import PassCost
from attention_contract.schemas.prompts import ModelInput
from attention_service.core.tensors import to_numpy, wide
from attention_service.models.costs.lens_costs import check_predicts_next
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.costs.question_stages import rows_stage
from attention_service.models.fit_memory import lens_bytes
from attention_service.models.inputs.input_stacks import Stack, Tokens
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_runner import RunSpec
from attention_service.models.loaded.streams.residual_stream import ResidualStream


@dataclass(frozen=True)
class RowsPlan:
    """A request for rows, checked."""

    stack: Stack
    rows: range
    width: int
    first: int
    """The first token that counts."""


def plan_rows(
    loaded: LoadedModel, request: JacobianRequest, stream: ResidualStream, costs: ModelCosts, free_bytes: int
) -> RowsPlan:
    """Check a request. Raises InvalidRequest that names the field at fault."""
    _check_fits(loaded, stream, "model")
    read = loaded.reader.read(ModelInput(text=request.text)).text
    ids = read.ids[0, : request.max_tokens].tolist()
    if len(ids) < request.skip_first + 2:
        raise InvalidRequest.at(
            "text",
            f"expected at least {request.skip_first + 2} tokens: skip_first ({request.skip_first}), one that counts "
            f"and the last; got {len(ids)}",
        )
    width = stream.readout.width
    rows = range(width)[request.start : request.start + costs.memory.jacobian_rows(len(ids), free_bytes)]
    texts = loaded.reader.batch([Tokens(ids, [None] * len(ids))] * len(rows))
    return RowsPlan(texts, rows, width, request.skip_first)


def _check_fits(loaded: LoadedModel, stream: ResidualStream, param: str) -> None:
    """Raise InvalidRequest, for the field ``param``, for a model to which no Jacobian lens is fitted."""
    check_predicts_next(loaded, param)
    if loaded.reader.pairs or stream.several_streams or stream.time_first:
        one = "states that are one stream" if stream.several_streams else "states that stand text by text"
        why = "a model with one stack of layers" if loaded.reader.pairs else one
        raise InvalidRequest.at(param, f"a Jacobian lens needs {why}")


def lens_fit_cost(
    loaded: LoadedModel, stream: ResidualStream, costs: ModelCosts, texts: int, length: int, free_bytes: int
) -> PassCost:
    """Price the fit of a lens over so many texts of so many tokens. Raises InvalidRequest."""
    _check_fits(loaded, stream, "fit")
    width = stream.readout.width
    rows = min(width, costs.memory.jacobian_rows(length, free_bytes))
    of_text = rows_stage(costs.memory, rows, length, of=width)
    held = lens_bytes(stream.count - 1, width)  # by the server
    return costs.priced("fit", [replace(of_text, times=texts * of_text.times, peak_bytes=of_text.peak_bytes + held)])


def jacobian_rows(loaded: LoadedModel, plan: RowsPlan, stream: ResidualStream) -> JacobianReply:
    """Run the copies of a text once, and differentiate each for its row."""
    points = stream.states[1:]
    with torch.enable_grad():
        states = loaded.runner.run(loaded.reader.arguments(plan.stack), RunSpec(keep=points)).at
    last = states[points[-1]]
    tokens = slice(plan.first, plan.stack.length - 1)
    upstream = torch.zeros_like(last)
    for copy, row in enumerate(plan.rows):
        upstream[copy, tokens, row] = 1
    gradients = torch.autograd.grad(last, [states[point] for point in points[:-1]], upstream)
    rows = torch.stack([wide(gradient[:, tokens]).mean(1) for gradient in gradients])
    return valid(JacobianReply, {"rows": to_numpy(rows), "width": plan.width})
