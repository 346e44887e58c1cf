"""The types of the clients' arguments: each model of the contract may also be given as a plain dict."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attention_client.array_likes import TensorLike
from attention_contract.schemas.attention import Dropout, Edit, Select
from attention_contract.schemas.complexity import Alternative, Shape, Sweep
from attention_contract.schemas.hopfield import Projections
from attention_contract.schemas.modules import ModuleConfig
from attention_contract.spec import AttentionSpec

ConfigLike = ModuleConfig | Mapping[str, Any]
SpecLike = AttentionSpec | Mapping[str, Any]
SelectLike = Select | Mapping[str, Sequence[int]]
EditLike = Edit | Mapping[str, Any]
DropoutLike = Dropout | Mapping[str, Any]
AlternativeLike = Alternative | Mapping[str, Any]
ProjectionsLike = Projections | Mapping[str, TensorLike]
TensorMap = Mapping[str, TensorLike]
ShapeLike = Shape | Mapping[str, int] | int
"""A number is the queries of one sequence."""
SweepLike = Sweep | Mapping[str, Any] | Sequence[int]
"""A list varies the length."""
PictureType = Literal["image/svg+xml", "image/png"]
