"""The types of the clients' arguments: each model of the contract may also be given as a plain dict."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attention_client.array_likes import TensorLike
from attention_client.calls import CallOptions
from attention_client.media_files import AudioLike, ImageLike
from attention_contract.schemas.analyses.attribution import Readout
from attention_contract.schemas.analyses.context import ContextSource
from attention_contract.schemas.analyses.effects import SweptEdit
from attention_contract.schemas.analyses.hopfield import Projections
from attention_contract.schemas.analyses.integrated_gradients import IntegratedGradients
from attention_contract.schemas.analyses.model_effects import ModelSweptEdit
from attention_contract.schemas.analyses.model_paths import PathReceivers, PathSenders
from attention_contract.schemas.analyses.probes import StateFeature, StatisticFeature, VectorFeature, Watch
from attention_contract.schemas.attention import Dropout, Edit, KernelName, Select, WeightsSelect
from attention_contract.schemas.costs.complexity import Alternative, SessionShape, Shape
from attention_contract.schemas.costs.model_complexity import PricedProbe, PricedVector
from attention_contract.schemas.costs.sweeps import Sweep
from attention_contract.schemas.model_requests import GivenAnswer, GivenUpstream, ModelStatisticOptions, PredictedLogit
from attention_contract.schemas.models import LayerRef
from attention_contract.schemas.modules import ModuleConfig
from attention_contract.schemas.prompts import Message
from attention_contract.schemas.sessions import Policy, SessionSource, SessionStep
from attention_contract.schemas.weights import Normalization, StatisticName, StatisticOptions
from attention_contract.spec import AttentionSpec

ConfigLike = ModuleConfig | Mapping[str, Any]
SpecLike = AttentionSpec | Mapping[str, Any]
SelectLike = Select | Mapping[str, Sequence[int]]
WeightsSelectLike = WeightsSelect | SelectLike
EditLike = Edit | Mapping[str, Any]
SweptEditLike = SweptEdit | Mapping[str, Any]
ModelSweptEditLike = ModelSweptEdit | Mapping[str, Any]
PathSendersLike = PathSenders | Mapping[str, Any]
PathReceiversLike = PathReceivers | Mapping[str, Any]
ProbeFeatureLike = StateFeature | StatisticFeature | VectorFeature | Mapping[str, Any]
PricedVectorLike = PricedVector | Mapping[str, Any]
PricedProbeLike = PricedProbe | Mapping[str, Any]
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


class ModelFields(CallOptions, total=False):
    """The inputs of a whole model beside one text, and the settings of the call; see ``client.models.forward``."""

    text_pair: str | Sequence[str] | None
    tokens: Sequence[int] | Sequence[Sequence[int]] | None
    token_type_ids: Sequence[int] | Sequence[Sequence[int]] | None
    messages: Sequence[Message | Mapping[str, Any]] | None
    answer: str | Sequence[str] | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    target: str | None
    images: Sequence[ImageLike] | None
    audio: Sequence[AudioLike] | None
    mask_seed: int | None
    layers: Literal["all"] | Sequence[LayerRef] | None
    edits: Mapping[str, Sequence[EditLike]] | None
    adapter: str | None


class SelectedFields(ModelFields, total=False):
    """The same, with a selection of heads and queries."""

    select: SelectLike | None


class ModelForwardFields(SelectedFields, total=False):
    """The fields of a model's forward request that are None by default."""

    positions: Sequence[int] | Sequence[Sequence[int]] | None
    compare: Literal["unedited", "base"] | None
    likelihood: Literal["masked"] | None
    watch: Sequence[Watch | Mapping[str, Any]]


class ModelGradientsFields(SelectedFields, total=False):
    """The fields of a request for a model's gradients that are None by default."""

    of: PredictedLogit | GivenAnswer | GivenUpstream | Mapping[str, Any] | None
    integrated: int | IntegratedGradients | Mapping[str, Any] | None


class ModelLensFields(ModelFields, total=False):
    """The fields of a request for a lens that are None by default."""

    lens: str | None
    positions: Sequence[int] | Sequence[Sequence[int]] | None
    labels: Sequence[str] | None


class ModelEffectsFields(ModelFields, total=False):
    """The fields of a request for a model's effects that are None by default."""

    sweep: ModelSweptEditLike | None
    from_: PathSendersLike | None
    to: PathReceiversLike | None
    of: PredictedLogit | GivenAnswer | GivenUpstream | Mapping[str, Any] | None
    labels: Sequence[str] | None


class ModelWeightsFields(ModelFields, total=False):
    """The fields of a request for a model's weights that are None by default."""

    select: WeightsSelectLike | None
    labels: Sequence[str] | None
    query_labels: Sequence[str] | None
    pool: int | None
    statistics: Sequence[StatisticName] | None
    statistic_options: ModelStatisticOptions | Mapping[str, Any] | None
    normalize: Normalization | None
    compare: Literal["unedited", "base"] | None
    watch: Sequence[Watch | Mapping[str, Any]]


class DrawFields(CallOptions, total=False):
    """The settings by which tokens are drawn that are None by default; see ``client.models.generate``."""

    top_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    min_tokens: int | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[str, float] | None


class ContextOptions(DrawFields, total=False):
    """The fields of a request for sources that are None by default; see ``client.models.context``."""

    messages: Sequence[Message | Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    sources: Sequence[ContextSource | Mapping[str, Any]] | None
    split: Literal["sentences", "messages"] | None
    answer: str | None
    max_tokens: int | None
    adapter: str | None


class SurveyFields(CallOptions, total=False):
    """The fields of a survey that are None by default; see ``client.models.survey``."""

    audio: Sequence[AudioLike] | None
    layers: Literal["all"] | Sequence[LayerRef] | None
    edits: Mapping[str, Sequence[EditLike]] | None
    answer: str | Sequence[str] | None
    statistic_options: ModelStatisticOptions | Mapping[str, Any] | None


class InputFields(CallOptions, total=False):
    """The inputs of attention beside query, key and value, and the settings of the call; see ``Client.forward``.

    A field of this and the following groups may be None, as one that is left out.
    """

    mask: TensorLike | None
    key_mask: TensorLike | None
    key_lengths: TensorLike | None
    global_mask: TensorLike | None
    positions: TensorLike | None
    gate: TensorLike | None
    beta: TensorLike | None
    initial_state: TensorLike | None
    initial_normalizer: TensorLike | None
    parameters: TensorMap | None
    kernel: KernelName | None
    version: str | None


class EditedFields(InputFields, total=False):
    """The inputs of attention that interventions may change."""

    edits: Sequence[EditLike] | None


class GradientsFields(EditedFields, total=False):
    """The fields of a request for gradients that are None by default; see ``Client.gradients``."""

    upstream: TensorLike | None
    tap_upstream: TensorMap | None
    directions: TensorMap | None
    select: SelectLike | None
    dropout: DropoutLike | None


class ForwardFields(EditedFields, total=False):
    """The fields of a forward request that are None by default; see ``Client.forward``."""

    select: SelectLike | None
    dropout: DropoutLike | None
    compare: Literal["unedited"] | None


class WeightsFields(EditedFields, total=False):
    """The fields of a request for weights that are None by default; see ``Client.weights``."""

    select: WeightsSelectLike | None
    pool: int | None
    query_mask: TensorLike | None
    statistics: Sequence[StatisticName] | None
    statistic_options: StatisticOptionsLike | None
    normalize: Normalization | None
    compare: Literal["unedited"] | None
    labels: Sequence[str] | None
    query_labels: Sequence[str] | None


class EffectsFields(EditedFields, total=False):
    """The fields of a request for effects that are None by default; see ``Client.effects``."""

    queries: Sequence[int] | None
    direction: TensorLike | None


class AttributionFields(EditedFields, total=False):
    """The fields of an attribution that are None by default; see ``Client.attribution``."""

    select: SelectLike | None
    upstream: TensorLike | None
    readout: ReadoutLike | None
    compare: Literal["unedited"] | None
    labels: Sequence[str] | None
    query_labels: Sequence[str] | None
