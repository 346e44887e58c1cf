"""Resident modules: making, importing, describing and replacing them.

Parameters of a module: ``q_proj.weight [H·D, d_model]``, ``k_proj.weight [Hkv·D, key_width]``,
``v_proj.weight [Hkv·Dv, value_width]``, ``o_proj.weight [d_model, H·Dv]``, each with an optional ``.bias``.
``Latent`` has those of a module whose projections read a latent.
"""

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field, model_validator

from attention_contract.base import WireModel, at_fault
from attention_contract.spec import AttentionSpec
from attention_contract.tensors import AnyNumber, Encoding, FloatArray, FloatName

ModuleName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Stack = Literal["encoder", "decoder", "text", "vision", "audio"]
MAX_WIDTH: Final = 1_048_576
Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]
MAX_HEADS: Final = 65_536
Heads = Annotated[int, Field(ge=1, le=MAX_HEADS)]


class Biases(WireModel):
    """The projections that have a bias."""

    q_proj: bool = False
    k_proj: bool = False
    v_proj: bool = False
    o_proj: bool = False


class Latent(WireModel):
    """Queries, or keys and values, made of a token's latent: a projection to fewer numbers, and their RMS norm.

    Parameters: ``q_down.weight [query, d_model]``, ``q_down_norm.weight [query]``,
    ``kv_down.weight [key_value + shared, key_width]`` and ``kv_down_norm.weight [key_value]``. ``q_proj.weight`` is
    then ``[H·D, query]``, ``k_proj.weight [Hkv·(D − shared), key_value]``, ``v_proj.weight [Hkv·Dv, key_value]``.
    Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1.
    """

    query: Width | None = None
    """Width of the queries' latent; null for queries without one."""
    key_value: Width | None = None
    """Width of the latent that keys and values share; null for keys and values without one."""
    shared: int = Field(default=0, ge=0, le=MAX_WIDTH)
    """The first numbers of every head's key, which all heads have in common: rows of ``kv_down`` without a norm."""
    eps: float = Field(1e-6, gt=0, le=1, allow_inf_nan=False)
    """Added to the mean square."""
    bias: bool = False
    """True if ``q_down`` and ``kv_down`` have a bias."""

    @model_validator(mode="after")
    def _of_something(self) -> "Latent":
        if self.query is None and self.key_value is None:
            raise at_fault("key_value", "expected it or query, got neither")
        if self.shared and self.key_value is None:
            raise at_fault("shared", "it is a part of the latent of keys and values; give key_value")
        return self


class ModuleConfig(WireModel):
    """The shape of a module and what it computes."""

    d_model: Width
    """Width of the query and of the output."""
    num_heads: Heads
    """Query heads."""
    num_kv_heads: Heads | None = None
    """Key/value heads; must divide ``num_heads``. Default: ``num_heads``. 1 is multi-query attention."""
    head_dim: Width | None = None
    """Width of a head's queries and keys; default: d_model / num_heads."""
    value_dim: Width | None = None
    """Width of a head's values; default: ``head_dim``."""
    key_width: Width | None = None
    """Input width of the keys; default: ``d_model``."""
    value_width: Width | None = None
    """Input width of the values; default: ``d_model``."""
    bias: bool | Biases | None = None
    """Biases on all projections, on none, or as listed. Default: on all; with given parameters, as they are given."""
    dtype: FloatName | None = None
    """The dtype of the computation. Default: float32; with given parameters, their dtype."""
    latent: Latent | None = Field(default=None, exclude_if=lambda latent: latent is None)
    """Projections that read a latent of the token, as in DeepSeek; without it they read the token."""
    spec: AttentionSpec = Field(default_factory=AttentionSpec)
    """The computation."""

    @model_validator(mode="after")
    def _latent_fits(self) -> "ModuleConfig":
        if self.latent is None or self.latent.key_value is None:
            return self
        head_dim = self.head_dim or self.d_model // self.num_heads
        if self.latent.shared >= head_dim:
            raise at_fault("latent", f"shared is {self.latent.shared}; expected less than head_dim, {head_dim}")
        widths = self.key_width or self.d_model, self.value_width or self.d_model
        if widths[0] != widths[1]:
            raise at_fault(
                "latent", f"keys and values have one latent, and inputs of widths {widths[0]} and {widths[1]}"
            )
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> "ModuleConfig":
        if self.head_dim is None and self.d_model % self.num_heads:
            raise at_fault(
                "d_model",
                f"{self.d_model} is not a multiple of num_heads {self.num_heads}; give head_dim to choose the width",
            )
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise at_fault("num_kv_heads", f"{self.num_kv_heads} does not divide num_heads {self.num_heads}")
        return self


class CreateModule(WireModel):
    """Make a module, from a seed or from its parameters."""

    name: ModuleName
    config: ModuleConfig
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    """Seed of Xavier-uniform weights and zero biases; default 0 if no parameters are given."""
    parameters: dict[str, FloatArray] | None = None
    """Every parameter by name."""
    durable: bool = True
    """False keeps the module only in this server's memory: nothing is written to disk, and a restart loses it."""

    @model_validator(mode="after")
    def _one_origin(self) -> "CreateModule":
        if self.seed is not None and self.parameters is not None:
            raise at_fault("seed", "expected it or parameters, got both")
        return self


class ImportModule(WireModel):
    """Make a module from one attention layer of a checkpoint in the model repository."""

    checkpoint: str = Field(min_length=1, max_length=4096)
    """Path inside the model repository: a folder with safetensors files, or one such file; or ``tiny``, which ships."""
    adapter: str | None = Field(default=None, min_length=1, max_length=4096)
    """The path of an adapter of this checkpoint, a folder with adapter_config.json and adapter_model.safetensors. The
    parameters are the checkpoint's with the adapter merged into them."""
    layer: int = Field(default=0, ge=0)
    """The number of the layer in its stack, from 0."""
    name: ModuleName | None = None
    """Default: the checkpoint's folder and the layer, as in ``minilm.0``."""
    part: Literal["self", "cross"] = "self"
    """Self-attention, or the attention of a decoder to its encoder."""
    stack: Stack | None = None
    """The stack to read, for a checkpoint that has several."""
    spec: AttentionSpec | None = None
    """Fields of the spec that replace those of the checkpoint, or that the checkpoint does not state, such as the masks
    of a torch state dict: ``{"masks": []}``. Other fields stay as in the checkpoint."""
    num_heads: int | None = Field(default=None, ge=1)
    """The number of heads. Needed if neither config.json nor the tensors' shapes state it, as for
    ``nn.MultiheadAttention``."""
    durable: bool = True
    """False keeps the module only in this server's memory, as for a created module."""


class Source(WireModel):
    """The origin of an imported module."""

    checkpoint: str
    adapter: str | None = None
    """The adapter that is merged into its parameters."""
    family: str
    layer: int
    part: Literal["self", "cross"]
    stack: Stack | None = None
    ignored: list[str] = Field(default_factory=list)
    """Tensors of the layer that the import ignored, because config.json excludes them; and an adapter that lies beside
    its base, with the ``adapter`` of a request that merges it."""
    quantized: str | None = None
    """The form that weights of the layer were unpacked from, such as ``GPTQ int4``."""


class ModuleInfo(WireModel):
    """One resident module."""

    name: str
    config: ModuleConfig
    """With every default filled in."""
    version: str
    """Content hash of config and parameters; also the ETag."""
    device: str
    parameter_count: int
    bytes: int
    """Bytes of its parameters on the device."""
    durable: bool = True
    """False for a module that exists only in memory, and is gone when the server stops."""
    source: Source | None = None


class ModuleList(WireModel):
    """Every resident module, by name."""

    modules: list[ModuleInfo]
    bytes: int
    """Bytes of all of them on the device."""


class ParameterInfo(WireModel):
    """One parameter: its shape and what its numbers look like.

    Parameters are taken as they come. Statistics are of the finite numbers, and NaN where there are none.
    """

    name: str
    shape: list[int]
    dtype: str
    bytes: int
    mean: AnyNumber
    std: AnyNumber
    """Standard deviation, the sum of squares divided by how many numbers there are."""
    min: AnyNumber
    max: AnyNumber
    norm: AnyNumber
    """Euclidean norm."""
    non_finite: int
    """The number of infinite or NaN elements."""


class ParameterList(WireModel):
    """Every parameter of a module."""

    name: str
    version: str
    parameters: list[ParameterInfo]


class ReplaceParameters(WireModel):
    """Replace all parameters of a module, or none: names and shapes must be those it has."""

    parameters: dict[str, FloatArray] = Field(min_length=1)
    """Every parameter by name; cast to the module's dtype."""
    version: str | None = Field(default=None, max_length=256)
    """Replace only if the module is at this version (as the header If-Match)."""


class ParameterQuery(WireModel):
    """The part of a parameter to read."""

    reads_text: ClassVar[bool] = True

    head: int | None = Field(default=None, ge=0)
    """Only the rows (of ``o_proj.weight``: the columns) of this head: a query head, or a key/value head of ``k_proj``
    and ``v_proj``."""
    slice: str | None = Field(default=None, max_length=256, examples=["0:4,:8"])
    """Then this slice of it: one ``start:stop:step`` or index for each dimension, separated by commas."""
    version: str | None = Field(default=None, max_length=256)
    """Refuse the request unless the module is at this version."""
    encoding: Encoding = "list"
    """The form of tensors in a JSON reply."""


class Parameter(WireModel):
    """One parameter, or a part of it."""

    name: str
    version: str
    value: FloatArray
