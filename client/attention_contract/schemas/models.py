"""Whole models: those that are resident, and those that can be loaded.

A layer is named by its number, or in a model of several stacks by its stack and number: ``3``, ``"encoder.3"``,
``"decoder.3"``, ``"cross.3"``, ``"vision.3"``.
"""

from typing import Annotated, Literal

from pydantic import Field

from attention_contract.base import WireModel
from attention_contract.exact_types import Index
from attention_contract.schemas.attention import EditableTap, Tap
from attention_contract.tensors import FloatName

ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
DeviceName = Annotated[str, Field(pattern=r"^(cpu|cuda:\d{1,3})$")]
StackLayer = Annotated[str, Field(pattern=r"^[a-z_]{1,32}\.\d{1,4}$")]
LayerRef = Index | StackLayer
"""``3``, or ``"decoder.3"`` in a model of several stacks."""
LayerKey = Annotated[str, Field(pattern=r"^([a-z_]{1,32}\.)?\d{1,4}$")]
"""The same as the key of an object: ``"3"`` or ``"decoder.3"``."""
EditedKey = Annotated[str, Field(pattern=r"^(embeddings|([a-z_]{1,32}\.)?\d{1,4})$")]
"""A layer whose edits an object holds, or ``"embeddings"`` for those of the model's embeddings."""


def layer_of(key: str) -> LayerRef:
    """Return the layer of a key: 3 for ``"3"``, and ``"decoder.3"`` as it is."""
    return int(key) if key.isdecimal() else key


class LoadModel(WireModel):
    """Make a checkpoint of the model repository a resident model."""

    checkpoint: str = Field(min_length=1, max_length=1024)
    """Its path inside the model repository: a folder with config.json and safetensors files; or ``tiny``, the model
    that ships with the server."""
    name: ModelName | None = None
    """Default: the path with ``--`` in place of ``/``, as in ``openai-community--gpt2``."""
    adapter: str | None = Field(default=None, min_length=1, max_length=1024)
    """An adapter to load beside the base at ``checkpoint``, by its path or name. The path of an adapter may also stand
    in ``checkpoint``: then its base is the one that its adapter_config.json names."""
    dtype: FloatName | None = None
    """The dtype of the computation; default: the checkpoint's on a GPU, float32 on a CPU."""
    device_map: Literal["auto", "balanced"] | None = None
    """``auto``: keep the layers that do not fit into memory on disk, as transformers does with accelerate; on a GPU
    server, use the host's memory before the disk. ``balanced`` is refused; ``devices`` divides a model over several."""
    devices: (
        Annotated[int, Field(ge=1, le=64)] | Annotated[list[DeviceName], Field(min_length=1, max_length=64)] | None
    ) = None
    """The devices that it is spread over, each of which has a part of every layer: their number, or their names as in
    ``["cuda:0", "cuda:1"]``. On a server without GPUs each is a process. Default: the server's setting."""


def default_model_name(checkpoint: str) -> str:
    """The name of a model of the checkpoint at a path: the path with ``--`` for ``/``."""
    return checkpoint.strip("/").replace("/", "--")


KeysOf = Literal["tokens", "compressed", "decoder + encoder", "windows"]
LayerKind = Literal["attention", "linear", "state_space"]
LayerTap = Tap | Literal["gate", "index_scores", "chosen", "mlp", "router", "hidden"]
"""The taps of a layer of a model: those of its attention; ``mlp``, what its MLP adds to the states, of experts the sum;
``router``, the weights of the experts in that sum; and ``hidden``, the state after the layer, before the final norm.
``gate`` is what a gated attention multiplies its context by. An attention that chooses keys has ``index_scores``, by
which its indexer chooses, and ``chosen``, the keys that a query may look at."""


class LayerGeneration(WireModel):
    """The answers of one layer while its model generates tokens."""

    attention: bool
    """True if ``layers`` of ``attention`` can name it, so that its weights come with each token."""
    edits: list[EditableTap]
    """The taps that ``edits`` of ``attention`` can change."""
    refused: dict[str, str]
    """The reason why ``layers`` cannot name it, under ``attention``, and by tap the reason why an edit of a forward
    request is refused while tokens are generated."""


class ModelLayer(WireModel):
    """One attention of a model, and what it can answer."""

    layer: LayerRef
    kind: LayerKind = "attention"
    """``attention``: a normalizer over pairs of tokens. ``linear``: linear attention, such as a gated delta net.
    ``state_space``: a selective state space, such as Mamba-2. The weights of the last two are implicit: the matrix M
    for which M·V is the mixed output, with negative numbers and rows that do not sum to 1."""
    keys: KeysOf = "tokens"
    """``tokens``: one key for each token of a text, or each patch of an image. ``compressed``: the tokens, then keys
    that each stand for a span of them (as in DeepSeek V4). ``decoder + encoder``: one softmax over the
    tokens of the decoder, then those of the encoder. ``windows``: the patches of one window of an image (as in Swin);
    queries are the same patches, and every result of the attention has a batch dimension of windows. ``key_labels`` of
    replies names such keys."""
    heads: int
    kv_heads: int
    head_dim: int | None = None
    taps: list[LayerTap] = Field(default_factory=list)
    """The taps that ``return`` of a forward request can name. Its weights can be asked for if ``weights`` is one."""
    edits: list[EditableTap] = Field(default_factory=list)
    """The taps that an edit can change."""
    gradients: list[LayerTap] = Field(default_factory=list)
    """The taps that ``wrt`` of a gradients request can name."""
    refused: dict[str, str] = Field(default_factory=dict)
    """Why it has no other of those that every attention has: the reason by tap."""
    generation: LayerGeneration | None = None
    """Its answers while tokens are generated; null if the model generates none."""


class ModelInfo(WireModel):
    """One model, with the fields of OpenAI's object of that name and more."""

    id: str
    """The name of the model."""
    object: Literal["model"] = "model"
    created: int
    """The time at which its checkpoint was written, in seconds since 1970."""
    owned_by: str = "attention-service"
    checkpoint: str
    """Its path inside the model repository."""
    base: str | None = None
    """The name of the model whose process has the adapter of a variant too, and answers for it."""
    adapter: str | None = None
    """The adapter of a variant, ``base:adapter``; or of a model in whose own folder one lies, and applies."""
    adapters: list[str] = Field(default_factory=list)
    """The adapters of the repository whose base it is. Each can be named as ``adapter`` of a request."""
    state: Literal["idle", "loading", "resident", "stuck"]
    """``idle``: the first request that names it loads it. ``stuck``: its process computes nothing although it is asked;
    it goes on, or is ended soon, and the next request starts it again."""
    progress: float | None = None
    """The share of a loading model that is loaded, 0 to 1."""
    architecture: str | None = None
    """The class of transformers that computes it, as in ``GPT2LMHeadModel``."""
    model_type: str | None = None
    takes: list[Literal["text", "text_pair", "messages", "images", "audio", "target"]] = Field(default_factory=list)
    """The kinds of input that its requests may have, besides ``tokens``."""
    generates: bool = False
    """True if it predicts the next token, so that it can generate."""
    predicts: Literal["next", "own", "class"] | None = None
    """``next``: the following token, of each. ``own``: the token in its place. ``class``: classes of texts, of tokens
    or of images. Null for a model without a prediction head."""
    classes: list[str] = Field(default_factory=list)
    """The names of the first 1,000 classes that it predicts, by number."""
    dtype: str | None = None
    stored: str | None = None
    """The form of the tensors in its files: a dtype, or a quantized form such as ``Q4_K_M``, from which they are
    dequantized when the model is loaded."""
    device: str | None = None
    devices: list[str] = Field(default_factory=list)
    """The devices that it is spread over once it is loaded, if they are several."""
    bytes: int = 0
    """Bytes of memory that are reserved for it: the estimate while it is idle or loading."""
    running: int = 0
    """Requests that its process has: those that it answers, and those that wait for memory."""
    waiting: int = 0
    """Requests that wait until others have their answers, or until the model is loaded."""
    max_length: int | None = None
    """The largest number of tokens, if the model has a limit."""
    edits: list[Literal["embeddings"]] = Field(default_factory=list)
    """The keys of ``edits`` besides its layers: ``embeddings`` if what its table of tokens returns, or what enters the
    first layer of a model of images or sounds, can be edited; known once the model is resident."""
    layers: list[ModelLayer] = Field(default_factory=list)
    """Its attentions in the order in which they run, vision layers after those of text; known once the model is
    resident."""
    attention: Literal["computed", "observed"] | None = None
    """The way in which its attentions are seen: ``computed`` by the server where the model asks the attention interface
    of transformers, or ``observed`` where the model computes its weights itself, which a trial finds while it loads;
    known once the model is resident."""
    unseen: list[str] = Field(default_factory=list)
    """Kinds of layers whose attention transformers computes, so that it cannot be inspected, such as linear
    attention."""
    without_weights: dict[str, str] = Field(default_factory=dict)
    """Its layers that mix tokens and are not among ``layers``, with the reason, by number or by stack and number; known
    once the model is resident."""
    left_out: list[str] = Field(default_factory=list)
    """Files of its folder that are not read, each with the reason, such as tensors in another format, a vocabulary of
    another kind than its tokenizer reads, or a config.json beside a GGUF file, which is read alone; files of an
    adapter's folder that are not used, such as another tokenizer. Once the model is resident, also the first 100
    tensors that it does not take, such as a classifier of texts; an ``eos_token_id`` beyond its vocabulary, with which
    no text ends; a tokenizer that cannot be read, or that has tokens for fewer than half of its embeddings."""
    refused: str | None = None
    """The reason why it cannot be loaded, found from its files without starting a process."""


class ModelList(WireModel):
    """Every model that is resident or can be loaded, in OpenAI's shape."""

    object: Literal["list"] = "list"
    data: list[ModelInfo]
