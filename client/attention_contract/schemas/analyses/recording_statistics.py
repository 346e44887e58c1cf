"""Statistics of the recorded weights: layers × heads."""

from pydantic import Field

from attention_contract.base import Listed, WireModel
from attention_contract.schemas.drawable_replies import DrawableReply
from attention_contract.schemas.recordings import Label, LayerName, RecordingId
from attention_contract.schemas.weights import MAX_CLASSES, ClassName, HeadStatistics, StatisticName
from attention_contract.tensors import Encoding


class RecordingStatisticsRequest(WireModel):
    """Ask for statistics of the weights of a recording. Its tokens are those of the statistics."""

    statistics: Listed[StatisticName] | None = Field(default=None, max_length=64)
    """The statistics to return. Default: entropy, max_weight, mean_distance, first_key and own_position."""
    layers: Listed[LayerName] | None = Field(default=None, min_length=1, max_length=4096)
    """The attentions to cover, such as ``layers.0``; default: all with recorded weights."""
    window: int = Field(default=8, ge=0, lt=2**31)
    """Tokens to each side that ``locality`` counts."""
    sinks: int = Field(default=1, ge=0, lt=2**31)
    """First keys that ``sink_share`` counts."""
    classes: dict[ClassName, Listed[Label]] = Field(default_factory=dict, max_length=MAX_CLASSES)
    """Labels of tokens by name: the class has the keys with one of these labels."""
    encoding: Encoding = "list"
    """The form of tensors in a JSON reply."""


class StatisticsOfAttention(WireModel):
    """The statistics of one recorded attention."""

    name: LayerName
    heads: list[str]
    """The label of each head."""
    queries: int
    """The number of queries in the means."""
    statistics: HeadStatistics
    """``[H]`` each."""


class RecordingStatistics(DrawableReply):
    """Statistics of the recorded weights, in the order of the layers."""

    id: RecordingId
    attentions: list[StatisticsOfAttention]
