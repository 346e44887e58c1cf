"""Effects of edits on the prediction of a whole model: one edit for each layer, head, query or key of a sweep."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from attention_contract.base import ABSENT, IfRequested, Listed, WireModel, at_fault
from attention_contract.exact_types import Index
from attention_contract.schemas.attention import MAX_INDICES, Edit
from attention_contract.schemas.drawable_replies import DrawableReply
from attention_contract.schemas.model_requests import GivenAnswer, GivenUpstream, PredictedLogit
from attention_contract.schemas.models import LayerRef
from attention_contract.schemas.prompts import ModelInput, ModelReply
from attention_contract.tensors import FloatArray

ModelAxis = Literal["layers", "heads", "queries", "keys"]
TokenGroup = Annotated[Listed[Index], Field(min_length=1, max_length=MAX_INDICES)]
MAX_GROUPS = 4096
"""The most groups of tokens of one axis."""


def _over_layers_and_heads() -> list[ModelAxis]:
    return ["layers", "heads"]


class ModelSweptEdit(Edit):
    """One edit for each index of the swept axes; every other axis keeps the indices that the edit lists.

    The layers are those of the request. An edit that is not swept over ``layers`` changes all of them at once.
    """

    over: Listed[ModelAxis] = Field(default_factory=_over_layers_and_heads, min_length=1, max_length=4)
    """The axes to sweep. Along each, one edit changes one of the listed indices, or one of all indices if none are
    listed. ``value`` covers all indices, and each edit uses its own part of it."""
    window: int = Field(default=1, ge=1, le=4096)
    """The number of layers in a row that each edit of a sweep over ``layers`` changes, from the swept one on. Source:
    Geva et al. 2023, section 5."""
    query_groups: Annotated[Listed[TokenGroup], Field(min_length=1, max_length=MAX_GROUPS)] | None = None
    """Groups of tokens that a sweep over ``queries`` takes in place of single ones: each edit changes one group."""
    key_groups: Annotated[Listed[TokenGroup], Field(min_length=1, max_length=MAX_GROUPS)] | None = None
    """The same for ``keys``: with both, the attention of one group of tokens to another is edited."""

    @model_validator(mode="after")
    def _distinct(self) -> "ModelSweptEdit":
        if len(set(self.over)) < len(self.over):
            raise at_fault("over", "an axis is listed twice; list each once")
        if self.window > 1 and "layers" not in self.over:
            raise at_fault("window", "it goes with a sweep over layers; add layers to over")
        for name, axis, listed in (
            ("query_groups", "queries", self.queries), ("key_groups", "keys", self.keys),
        ):  # fmt: skip
            if getattr(self, name) is None:
                continue
            if axis not in self.over:
                raise at_fault(name, f"it goes with a sweep over {axis}; add {axis} to over")
            if listed is not None:
                raise at_fault(name, f"it takes the place of {axis}; leave {axis} out")
        return self


class ModelEffectsRequest(ModelInput):
    """Ask for the effect of each edit of a sweep on one number that a model predicts.

    ``layers`` are those that are swept. ``edits`` apply in every run, also in the baseline.
    """

    sweep: ModelSweptEdit
    """The edits to try, one at a time."""
    of: PredictedLogit | GivenAnswer | GivenUpstream | None = None
    """The number whose change is measured, as in ``gradients``. Default: log p of a given answer, or of the token that
    is most likely at the last position without the swept edit."""


class ModelEffects(WireModel):
    """The change by each edit, ``[B, *swept]`` with the swept axes in the order of ``over``.

    NaN where a layer has no such head, query or key.
    """

    value: FloatArray
    """The measured number with the edit minus that without it."""
    divergence: IfRequested[FloatArray] = ABSENT
    """Σ p · ln(p / q) of the predictions p without and q with the edit, in nats: at the position of ``of``; of a given
    answer the sum over its tokens, or the mean as in ``of``; of ``upstream`` the mean over its positions. Absent for a
    model that scores, finds an answer in a text, or predicts nothing."""


class ModelEffectsReply(ModelReply, DrawableReply):
    """The change of a prediction by each edit of the sweep. Source: Vig et al. 2020, causal mediation analysis."""

    swept: dict[ModelAxis, list[LayerRef] | list[list[int]]]
    """The indices along each swept axis: layers, numbers of heads, queries and keys, or groups of tokens. Of a window
    of layers, its first."""
    baseline: FloatArray
    """``[B]``, or one number: the measured number without the swept edit."""
    effects: ModelEffects
    token: IfRequested[list[int]] = ABSENT
    """The token ids whose log-probability is measured, one for each text."""
    token_names: IfRequested[list[str]] = ABSENT
    """The same tokens, or classes, as text."""
