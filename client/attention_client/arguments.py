"""The types of the clients' arguments: each model of the contract may also be given as a plain dict."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attention_client.array_likes import TensorLike
from attention_client.calls import CallOptions
from attention_contract.schemas.attention import Dropout, Edit, KernelName, Select, Tap
from attention_contract.schemas.attribution import AttributionMethod, Readout
from attention_contract.schemas.complexity import Alternative, Shape, Sweep
from attention_contract.schemas.effects import SweptEdit
from attention_contract.schemas.hopfield import Projections
from attention_contract.schemas.modules import ModuleConfig
from attention_contract.schemas.session_costs import SessionShape
from attention_contract.schemas.sessions import Policy, SessionSource, SessionStep
from attention_contract.schemas.weights import StatisticName, StatisticOptions
from attention_contract.spec import AttentionSpec

ConfigLike = ModuleConfig | Mapping[str, Any]
SpecLike = AttentionSpec | Mapping[str, Any]
SelectLike = Select | Mapping[str, Sequence[int]]
EditLike = Edit | Mapping[str, Any]
SweptEditLike = SweptEdit | Mapping[str, Any]
DropoutLike = Dropout | Mapping[str, Any]
AlternativeLike = Alternative | Mapping[str, Any]
SessionShapeLike = SessionShape | Mapping[str, Any]
ProjectionsLike = Projections | Mapping[str, TensorLike]
TensorMap = Mapping[str, TensorLike]
ShapeLike = Shape | Mapping[str, int] | int
"""A number is the queries of one sequence."""
SweepLike = Sweep | Mapping[str, Any] | Sequence[int]
"""A list varies the length."""
PolicyLike = Policy | Mapping[str, Any]
SourceLike = SessionSource | Mapping[str, Any]
StatisticOptionsLike = StatisticOptions | Mapping[str, Any]
ReadoutLike = Readout | Mapping[str, TensorLike]
StepLike = SessionStep | Mapping[str, Any]


class InputFields(CallOptions, total=False):
    """The inputs of new tokens beside query, key and value; see ``Client.forward``."""

    mask: TensorLike
    key_mask: TensorLike
    key_lengths: TensorLike
    global_mask: TensorLike
    positions: TensorLike
    gate: TensorLike
    beta: TensorLike
    initial_state: TensorLike
    initial_normalizer: TensorLike
    parameters: TensorMap
    version: str
    kernel: KernelName
    edits: Sequence[EditLike]


class TapsFields(InputFields, total=False):
    """The fields that say what to compute and to return beside query, key and value; see ``Client.forward``."""

    select: SelectLike
    return_: Sequence[Tap]
    average_heads: bool
    dropout: DropoutLike
    return_state: bool
    report_error: bool


class StepFields(TapsFields, total=False):
    """The fields of a step beside query, key and value; see ``Client.forward``."""

    compare: Literal["unedited"]


class WeightsFields(InputFields, total=False):
    """The fields of a request for weights beside query, key and value; see ``Client.weights``."""

    select: SelectLike
    top_k: int
    return_weights: bool
    pool: int
    average_heads: bool
    query_mask: TensorLike
    statistics: Sequence[StatisticName]
    statistic_options: StatisticOptionsLike
    compare: Literal["unedited"]
    labels: Sequence[str]
    query_labels: Sequence[str]


class EffectsFields(InputFields, total=False):
    """The fields of a request for effects beside query, key and value; see ``Client.effects``."""

    sweep: SweptEditLike
    queries: Sequence[int]
    direction: TensorLike
    return_differences: bool


class AttributionFields(InputFields, total=False):
    """The fields of an attribution beside query, key and value; see ``Client.attribution``."""

    select: SelectLike
    methods: Sequence[AttributionMethod]
    upstream: TensorLike
    readout: ReadoutLike
    steps: int
    compare: Literal["unedited"]
    labels: Sequence[str]
    query_labels: Sequence[str]


class GradientsFields(TapsFields, total=False):
    """The fields of a request for gradients beside query, key and value; see ``Client.gradients``."""

    wrt: Sequence[str]
    upstream: TensorLike
    tap_upstream: TensorMap
    check: bool
    directions: TensorMap
