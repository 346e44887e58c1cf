"""Checkpoints of the model repository: what they hold, before anything is loaded."""

from typing import Literal

from pydantic import Field

from attention_contract.base import WireModel
from attention_contract.schemas.modules import ModuleConfig, Stack


class CheckpointAttention(WireModel):
    """One attention layer of a checkpoint, by the headers of its files alone."""

    name: str
    """The name that an import gives its module: ``{model}.{layer}``, with ``.{stack}`` before the layer if the
    checkpoint has several stacks, and ``.cross`` after it for cross-attention."""
    layer: int
    part: Literal["self", "cross"]
    stack: Stack | None = None
    config: ModuleConfig | None = None
    """The config of the module that an import would make. Null if fields are missing, or if it cannot be imported."""
    missing: list[str] = Field(default_factory=list)
    """The fields that an import request must add, such as ``num_heads``: the checkpoint does not state them, and they
    change the numbers."""
    problem: str | None = None
    """The reason why the layer cannot be imported."""
    ignored: list[str] = Field(default_factory=list)
    """Tensors of the layer that an import ignores, because config.json excludes them."""
    bytes: int = 0
    """Bytes of its parameters on the device, if it can be imported."""
    tensors: dict[str, str] = Field(default_factory=dict)
    """The tensor of the checkpoint that holds each parameter, by the parameter's name. Several parameters may be cut
    from one tensor, as ``q_proj.weight``, ``k_proj.weight`` and ``v_proj.weight`` from ``h.0.attn.c_attn.weight``."""


class FetchProgress(WireModel):
    """The progress of a fetch from the Hugging Face hub. Totals are null until the hub has told them."""

    revision: str | None = None
    """The commit that is fetched."""
    bytes: int
    """Bytes that have come."""
    total_bytes: int | None = None
    files: int
    """Files that are complete."""
    total_files: int | None = None


class CheckpointInfo(WireModel):
    """One checkpoint of the model repository."""

    path: str
    """Its path inside the repository, by which an import names it."""
    family: str | None = None
    """The family of models that its tensor names belong to; null if none is known."""
    model_type: str | None = None
    """The entry of its config.json."""
    bytes: int
    """Bytes of its safetensors files."""
    layers: int = 0
    """The number of layers with attention, over all stacks."""
    heads: int | None = None
    """Query heads of the first attention."""
    d_model: int | None = None
    """Width of the first attention's query and output."""
    problem: str | None = None
    """The reason why no layer can be imported."""
    fetch: FetchProgress | None = None
    """The progress of its download; null if it is complete."""


class CheckpointReply(CheckpointInfo):
    """One checkpoint, and each of its attention layers."""

    attentions: list[CheckpointAttention] = Field(default_factory=list)


class CheckpointList(WireModel):
    """Every checkpoint of the model repository, by path."""

    checkpoints: list[CheckpointInfo]


class FetchCheckpoint(WireModel):
    """Download the safetensors files and the configs of a repository of the Hugging Face hub."""

    repository: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}$")
    """Its name, as in ``openai-community/gpt2``, which is also its path in the model repository."""
    revision: str | None = Field(default=None, min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")
    """A branch, a tag or a commit; default: the main branch."""
    wait_s: float | None = Field(default=None, ge=0, le=3600)
    """Seconds to wait for it; the reply then says in ``fetch`` how far it is. Default: until it is there. It is fetched
    also if nobody waits any more, and those who ask for the same checkpoint share one fetch."""
