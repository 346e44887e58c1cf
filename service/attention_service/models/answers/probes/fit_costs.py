"""The cost of fits of probes and of steering vectors: a question about each text, and what the server holds meanwhile.

A question about a text that is there and one about a number of tokens have the same stage.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

import torch

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.probes import FeaturesRequest, StateFeature, StatisticFeature, VectorFeature
from attention_contract.schemas.analyses.vectors import StatesRequest
from attention_contract.schemas.costs.model_complexity import (
    ModelComplexityRequest,
    PassCost,
    PricedProbe,
    PricedVector,
)
from attention_service.models.answers.probes.text_states import StatesPlan, plan_states
from attention_service.models.answers.probes.token_features import FeaturesPlan, feature_widths, plan_features
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.costs.pass_memory import PassMemory
from attention_service.models.costs.question_stages import Stage, input_stage
from attention_service.models.fit_memory import probe_bytes, vector_bytes
from attention_service.models.inputs.input_stacks import Stack
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.modules.fitted_store import DIRECTIONS, arrays_by_layer, check_layer

PlanT = TypeVar("PlanT", FeaturesPlan, StatesPlan)
_HIDDEN: Final = "hidden"


def features_stage(memory: PassMemory, plan: FeaturesPlan) -> Stage:
    """The pass of a question for the features of a text."""
    stage = input_stage(memory, plan.checked, plan.asked)
    return replace(stage, peak_bytes=stage.peak_bytes + plan.beside_bytes)


def states_stage(memory: PassMemory, plan: StatesPlan) -> Stage:
    """The pass of a question for the states of a text."""
    return input_stage(memory, plan.checked, plan.asked)


def probe_cost(
    loaded: LoadedModel, costs: ModelCosts, request: ModelComplexityRequest, probe: PricedProbe,
    vectors: Mapping[str, str],
) -> PassCost:  # fmt: skip
    """Price the fit of a probe to texts of the sizes of a request. Raises InvalidRequest.

    ``vectors``: the file of the steering vector that is its feature, by its id.
    """
    of, widths = probe.of, None
    if isinstance(of, VectorFeature):
        directions = arrays_by_layer(Path(vectors[of.vector]), DIRECTIONS)
        check_layer(directions, of.layer, "probe.of.layer")
        widths = [1] * (len(directions) if of.layer == "all" else 1)  # of the products
        of = StateFeature(point=_HIDDEN, layer=of.layer)
    with _within("probe"):
        plan = plan_features(loaded, FeaturesRequest(of=of))
    held = probe_bytes(request.batch, request.batch * probe.samples, widths or feature_widths(loaded, plan))
    stage = features_stage(costs.memory, _of_length(loaded, plan, request.length))
    return _priced(costs, request, stage, held, "weights" if isinstance(of, StatisticFeature) else "forward")


def vector_cost(
    loaded: LoadedModel, costs: ModelCosts, request: ModelComplexityRequest, vector: PricedVector
) -> PassCost:
    """Price the fit of a steering vector to texts of the sizes of a request. Raises InvalidRequest."""
    with _within("vector"):
        plan = plan_states(loaded, StatesRequest(layers=vector.layers))
    places, pairs = plan.checked.places, request.batch // 2 if vector.method == "pca" else 0
    held = vector_bytes(pairs, len(places), loaded.runner.width((places[0].key, _HIDDEN)) or 0)
    stage = states_stage(costs.memory, _of_length(loaded, plan, request.length))
    return _priced(costs, request, stage, held, "forward")


def _priced(costs: ModelCosts, request: ModelComplexityRequest, stage: Stage, held: int, kind: str) -> PassCost:
    """The cost of a stage for each text. ``held``: what the server holds."""
    return costs.priced(kind, [replace(stage, times=request.batch, peak_bytes=stage.peak_bytes + held)])


def _of_length(loaded: LoadedModel, plan: PlanT, length: int) -> PlanT:
    """The plan of a question about so many tokens, which have no numbers. Raises InvalidRequest."""
    most = loaded.reader.max_length
    if most is not None and length > most:
        raise InvalidRequest.at("length", f"the model reads texts of up to {most} tokens")
    text = Stack(torch.empty((1, length), dtype=torch.int64, device="meta"), None, [[]])
    return replace(plan, checked=replace(plan.checked, inputs=replace(plan.checked.inputs, text=text)))


@contextmanager
def _within(field: str) -> Iterator[None]:
    """Name the fields of a fit in refusals as parts of this one."""
    try:
        yield
    except InvalidRequest as fault:
        given = fault.param or ""
        param = f"{field}.{given}" if given.partition(".")[0] in {"of", "layers"} else field
        raise InvalidRequest(fault.detail.replace(given, param, 1), param=param, **fault.facts) from None
