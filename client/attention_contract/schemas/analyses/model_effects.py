"""Effects on the prediction of a whole model: of each edit of a sweep, or of each path between its components."""

from typing import Annotated, ClassVar, Literal, Protocol

from pydantic import Field, model_validator

from attention_contract.base import ABSENT, IfRequested, Listed, WireModel, at_fault
from attention_contract.exact_types import Index
from attention_contract.schemas.analyses.model_paths import PathEnd, PathReceivers, PathSenders
from attention_contract.schemas.attention import MAX_INDICES, Edit, TextLabels
from attention_contract.schemas.drawable_replies import DrawableReply
from attention_contract.schemas.model_requests import GivenAnswer, GivenUpstream, PredictedLogit
from attention_contract.schemas.models import LayerRef
from attention_contract.schemas.prompts import ModelInput, ModelReply
from attention_contract.tensors import FloatArray

ModelAxis = Literal["layers", "heads", "queries", "keys", "scales"]
SweptAxis = ModelAxis | Literal["from", "to"]
TokenGroup = Annotated[Listed[Index], Field(min_length=1, max_length=MAX_INDICES)]
MAX_GROUPS = 4096
"""The most groups of tokens of one axis."""
MAX_SCALES = 4096
"""The most factors of a sweep over scales."""
Factor = Annotated[float, Field(allow_inf_nan=False)]


def _over_layers_and_heads() -> list[ModelAxis]:
    return ["layers", "heads"]


class ModelSweptEdit(Edit):
    """One edit for each index of the swept axes; every other axis keeps the indices that the edit lists.

    The layers are those of the request. An edit that is not swept over ``layers`` changes all of them at once.
    """

    over: Listed[ModelAxis] = Field(default_factory=_over_layers_and_heads, min_length=1, max_length=5)
    """The axes to sweep. Along each, one edit changes one of the listed indices, or one of all indices if none are
    listed. A tensor in ``value`` or ``add`` covers all indices, and each edit uses its own part of it."""
    scales: Listed[Factor] | None = Field(default=None, min_length=1, max_length=MAX_SCALES)
    """The factors of a sweep over ``scales``: each edit adds ``add`` times one of them."""
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
        if ("scales" in self.over) != (self.scales is not None):
            raise at_fault("scales", "a sweep over scales and the list of them go together; send both or neither")
        if self.scales is not None and self.add is None:
            raise at_fault("scales", "they multiply what an edit adds; send add, or leave scales out")
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


class ModelEffectsRequest(TextLabels, ModelInput):
    """Ask for the effect of each edit of a sweep, or of each path, on one number that a model predicts.

    ``layers`` are those that are swept: by default all that have the tap, but in a sweep over heads no layer whose
    channels stand for heads, which has to be named. ``edits`` apply in every run of a sweep, also in the baseline.
    The labels take the place of swept queries and keys in a picture of the reply.
    """

    sweep: ModelSweptEdit | None = None
    """The edits to try, one at a time."""
    from_: PathSenders | None = Field(default=None, alias="from")
    """The beginnings of paths, in place of a sweep. Along a path, a change goes through the residual stream alone from
    one component to one other: all others have their outputs of the baseline."""
    to: PathReceivers | None = None
    """The ends of these paths, by default the logits. Behind an end, the rest of the run follows from what it makes."""
    of: PredictedLogit | GivenAnswer | GivenUpstream | None = None
    """The number whose change is measured, as in ``gradients``. Default: log p of a given answer, or of the token that
    is most likely at the last position without the swept edit."""

    @model_validator(mode="after")
    def _sweep_or_paths(self) -> "ModelEffectsRequest":
        check_sweep_or_paths(self)
        if self.sweep is None and self.from_ is None:
            raise at_fault("sweep", "expected a sweep, or paths by from and to; got neither")
        if self.from_ is not None and any(self.edits.values()):
            raise at_fault("edits", "they go with a sweep; leave them out of a request for paths")
        if self.labels is not None and (self.sweep is None or not {"queries", "keys"} & {*self.sweep.over}):
            raise at_fault("labels", "they name swept queries and keys; sweep over one of them, or leave labels out")
        return self

    @property
    def receivers(self) -> PathReceivers:
        """The ends of paths."""
        return PathReceivers() if self.to is None else self.to


class _SweepOrPaths(Protocol):
    @property
    def sweep(self) -> ModelSweptEdit | None: ...
    @property
    def from_(self) -> PathSenders | None: ...
    @property
    def to(self) -> PathReceivers | None: ...


def check_sweep_or_paths(request: _SweepOrPaths) -> None:
    """Raise an error of validation for a request with a sweep and paths, or with the end of paths alone."""
    if request.sweep is not None and request.from_ is not None:
        raise at_fault("from", "it takes the place of sweep; leave one of the two out")
    if request.to is not None and request.from_ is None:
        raise at_fault("to", "it goes with from, the beginnings of paths")


class ModelEffects(WireModel):
    """The change by each edit, ``[B, *swept]`` with the swept axes in the order of ``over``; or ``from``, then ``to``.

    NaN where a layer has no such head, query or key, and where the end of a path does not come after its beginning.
    """

    value: FloatArray
    """The measured number with the change minus that without it."""
    divergence: IfRequested[FloatArray] = ABSENT
    """Σ p · ln(p / q) of the predictions p without and q with the change, in nats: at the position of ``of``; of a
    given answer the sum over its tokens, or the mean as in ``of``; of ``upstream`` the mean over its positions. Absent
    for a model that scores, finds an answer in a text, or predicts nothing."""


class ModelEffectsReply(ModelReply, DrawableReply):
    """The change of a prediction by each edit of the sweep, or along each path.

    Source: Vig et al. 2020, causal mediation analysis; of paths, Wang et al. 2022.
    """

    picture_names: ClassVar = frozenset({"labels"})

    swept: dict[SweptAxis, list[LayerRef] | list[list[int]] | list[PathEnd] | list[float]]
    """The indices along each swept axis: layers, numbers of heads, queries and keys, groups of tokens, or scales. Of a
    window of layers, its first. Of paths: the components at their beginnings and ends."""
    baseline: FloatArray
    """``[B]``, or one number: the measured number without the swept edit."""
    effects: ModelEffects
    token: IfRequested[list[int]] = ABSENT
    """The token ids whose log-probability is measured, one for each text."""
    token_names: IfRequested[list[str]] = ABSENT
    """The same tokens, or classes, as text."""
