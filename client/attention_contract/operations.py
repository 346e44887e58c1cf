"""The table of operations: method, path, request, reply and errors, each stated once.

The server makes its routes from this table, the client its calls.
"""

from dataclasses import dataclass, field
from typing import Any, Final, Generic, Literal, TypeVar, get_args

from attention_contract import errors
from attention_contract.base import WireModel
from attention_contract.errors import AttentionError
from attention_contract.schemas.analyses.attribution import AttributionReply, AttributionRequest, RawAttributionRequest
from attention_contract.schemas.analyses.circuits import EXAMPLE_CIRCUITS, CircuitsReply, CircuitsRequest
from attention_contract.schemas.analyses.context import EXAMPLE_CONTEXT, ContextReply, ContextRequest
from attention_contract.schemas.analyses.effects import EffectsReply, EffectsRequest, RawEffectsRequest
from attention_contract.schemas.analyses.hopfield import EXAMPLE_HOPFIELD, HopfieldReply, HopfieldRequest
from attention_contract.schemas.analyses.lenses import FitLens, LensInfo, LensList, ModelLensReply, ModelLensRequest
from attention_contract.schemas.analyses.model_effects import ModelEffectsReply, ModelEffectsRequest
from attention_contract.schemas.analyses.probes import EXAMPLE_PROBE, FitProbe, ProbeInfo, ProbeList
from attention_contract.schemas.analyses.recording_statistics import RecordingStatistics, RecordingStatisticsRequest
from attention_contract.schemas.analyses.rollout import (
    EXAMPLE_ROLLOUT,
    RecordingRollout,
    RecordingRolloutRequest,
    RolloutReply,
    RolloutRequest,
)
from attention_contract.schemas.analyses.similarity import (
    EXAMPLE_SIMILARITY,
    RecordingSimilarity,
    RecordingSimilarityRequest,
    SimilarityReply,
    SimilarityRequest,
)
from attention_contract.schemas.analyses.vectors import EXAMPLE_VECTOR, FitVector, VectorInfo, VectorList
from attention_contract.schemas.attention import (
    EXAMPLE_INPUTS,
    EXAMPLE_REPLY,
    ForwardReply,
    ForwardRequest,
    RawForwardRequest,
)
from attention_contract.schemas.checkpoints import CheckpointList, CheckpointReply, FetchCheckpoint
from attention_contract.schemas.costs.accuracy import AccuracyReply
from attention_contract.schemas.costs.complexity import ComplexityReply, ComplexityRequest, RawComplexityRequest
from attention_contract.schemas.costs.hardware import HardwareList
from attention_contract.schemas.costs.model_complexity import ModelComplexityReply, ModelComplexityRequest
from attention_contract.schemas.gradients import (
    BackwardRequest,
    GradientsReply,
    GradientsRequest,
    PassReply,
    PassRequest,
    RawGradientsRequest,
    RawPassRequest,
)  # fmt: skip
from attention_contract.schemas.model_requests import (
    ModelForwardReply,
    ModelForwardRequest,
    ModelGradientsReply,
    ModelGradientsRequest,
    ModelWeightsReply,
    ModelWeightsRequest,
)
from attention_contract.schemas.models import LoadModel, ModelInfo, ModelList
from attention_contract.schemas.modules import (
    CreateModule,
    ImportModule,
    ModuleInfo,
    ModuleList,
    Parameter,
    ParameterList,
    ParameterQuery,
    ReplaceParameters,
)
from attention_contract.schemas.openai import (
    EXAMPLE_CHAT,
    EXAMPLE_COMPLETION,
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    EmbeddingRequest,
    Embeddings,
    OpenAIRequest,
)
from attention_contract.schemas.openai_api.responses import EXAMPLE_RESPONSE, ModelResponse, ResponseRequest
from attention_contract.schemas.openai_api.scoring import (
    EXAMPLE_RANKING,
    EXAMPLE_SCORES,
    PairScores,
    Ranking,
    RerankRequest,
    ScoreRequest,
)
from attention_contract.schemas.openai_api.tokenization import EXAMPLE_TOKENIZATION, Tokenization, TokenizeRequest
from attention_contract.schemas.openai_api.transcriptions import EXAMPLE_SOUND, Transcription, TranscriptionRequest
from attention_contract.schemas.picture_options import WEIGHT_VIEWS, View
from attention_contract.schemas.prompts import EXAMPLE_TEXT
from attention_contract.schemas.recordings import (
    EXAMPLE_RECORDING,
    RecordingFile,
    RecordingInfo,
    RecordingList,
    RecordingQuery,
)
from attention_contract.schemas.server import Health, ServerInfo, VariantList
from attention_contract.schemas.sessions import (
    ForkSession,
    ListSessions,
    OpenSession,
    ReorderSession,
    ReplaceCache,
    SessionAttributionRequest,
    SessionCache,
    SessionEffectsRequest,
    SessionGradientsRequest,
    SessionInfo,
    SessionList,
    SessionWeightsRequest,
    StepReply,
    StepRequest,
    StepsReply,
    StepsRequest,
    TruncateSession,
)
from attention_contract.schemas.text_similarity import TextSimilarityReply, TextSimilarityRequest
from attention_contract.schemas.weights import RawWeightsRequest, WeightsReply, WeightsRequest
from attention_contract.wire import EVENTS, GGUF, PLAIN

ReplyT = TypeVar("ReplyT", bound=WireModel | None)
KeyScope = Literal["infer", "inspect", "manage", "metrics"]
Scopes = frozenset[KeyScope]
Method = Literal["GET", "POST", "PUT", "DELETE"]

ANY_TIME: Final = (errors.NotAcceptable, errors.InternalError, errors.Unavailable)
READS_BODY: Final = (
    *ANY_TIME, errors.Unreadable, errors.BodyTooLarge, errors.UnsupportedMediaType, errors.InvalidRequest,
    errors.OverBudget, errors.Overloaded, errors.NeverFits,
)  # fmt: skip
"""A body takes memory, like a computation."""
OF_MODULE: Final = (errors.ModuleNotFound, errors.VersionMismatch)
READS_MODULE: Final = (*ANY_TIME, *OF_MODULE, errors.InvalidRequest)
"""The last: an If-Match that is no version."""
WRITES: Final = (errors.StoreFull, errors.StoreReadOnly)
OF_MODEL: Final = (errors.ModelNotFound, errors.InvalidCheckpoint)
"""The last: the first request loads the model."""
EDITS_MODEL: Final = (*OF_MODEL, errors.VectorNotFound)
"""The last: edits may add vectors."""
WATCHES_MODEL: Final = (*EDITS_MODEL, errors.ProbeNotFound)
INFER: Final[Scopes] = frozenset({"infer"})
INSPECT: Final[Scopes] = frozenset({"inspect"})
MANAGE: Final[Scopes] = frozenset({"manage"})
METRICS: Final[Scopes] = frozenset({"metrics"})
ASK: Final = INFER | INSPECT
"""To ask of a module, a session or a model how its answers come about: questions that change and store nothing."""
OWN: Final = INFER | MANAGE
"""To see and to end what is one's own."""
SEE: Final = INFER | INSPECT | MANAGE
ANY_KEY: Final[Scopes] = frozenset(get_args(KeyScope))
NO_KEY: Final[Scopes] = frozenset()
OF_SESSION: Final = (errors.SessionNotFound, errors.SessionGone, errors.LengthMismatch, errors.VersionMismatch)
_QUERY = {"query": [[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8], [0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]]}


@dataclass(frozen=True)
class Operation(Generic[ReplyT]):
    """One operation over HTTP."""

    name: str
    method: Method
    path: str
    request: type[WireModel] | None
    """The model of the body, or of a GET's query string."""
    reply: type[ReplyT] | None
    summary: str
    errors: tuple[type[AttentionError], ...] = ANY_TIME
    scopes: Scopes = field(kw_only=True)
    """The scopes of API keys that let a caller in, one of which is enough; none for an operation that needs no key."""
    status: int = 200
    tensors: bool = False
    """Bodies may be safetensors files."""
    pictures: tuple[View, ...] = ()
    """The views that can be drawn as a picture."""
    tables: bool = False
    """Replies may be tables of Arrow and Parquet."""
    chosen: tuple[str, ...] = ()
    """Media types of replies besides JSON that fields of the request choose, as ``stream`` does."""
    form: bool = False
    """The body may be a form with a file."""
    safe_to_repeat: bool = True
    """The operation is idempotent, so a client may repeat it after a lost reply."""
    example: dict[str, Any] | None = None
    """A request body that works as it stands."""
    reply_example: dict[str, Any] | None = None
    """The reply to it, for the documentation; None for one that is long."""


server_info = Operation(
    "server_info", "GET", "/v1", None, ServerInfo, "Version, device, dtypes and limits", scopes=ANY_KEY,
)  # fmt: skip
list_variants = Operation(
    "list_variants", "GET", "/v1/variants", None, VariantList,
    "Every registered score, mask, position, normalizer, method and kernel", scopes=ANY_KEY,
)  # fmt: skip
list_checkpoints = Operation(
    "list_checkpoints", "GET", "/v1/checkpoints", None, CheckpointList,
    "Every checkpoint of the model repository", scopes=SEE,
)  # fmt: skip
fetch_checkpoint = Operation(
    "fetch_checkpoint", "POST", "/v1/checkpoints", FetchCheckpoint, CheckpointReply,
    "Download a checkpoint from the Hugging Face hub into the model repository",
    (*READS_BODY, *WRITES, errors.Forbidden, errors.CheckpointNotFound, errors.InvalidCheckpoint, errors.Conflict),
    example={"repository": "sentence-transformers/all-MiniLM-L6-v2"}, scopes=MANAGE,
)  # fmt: skip
cancel_fetch: Operation[None] = Operation(
    "cancel_fetch", "DELETE", "/v1/checkpoints/{path}", None, None,
    "Stop fetching a checkpoint; nothing of it is kept, and those who wait for it get an error",
    (*ANY_TIME, errors.CheckpointNotFound), status=204, safe_to_repeat=False, scopes=MANAGE,
)  # fmt: skip
get_checkpoint = Operation(
    "get_checkpoint", "GET", "/v1/checkpoints/{path}", None, CheckpointReply,
    "A checkpoint's family, and the config of each of its attention layers",
    (*ANY_TIME, errors.CheckpointNotFound, errors.InvalidCheckpoint), scopes=SEE,
)  # fmt: skip
list_modules = Operation("list_modules", "GET", "/v1/modules", None, ModuleList, "Every resident module", scopes=SEE)
create_module = Operation(
    "create_module", "POST", "/v1/modules", CreateModule, ModuleInfo,
    "Make a module from a seed or from its parameters",
    (*READS_BODY, *WRITES, errors.ModuleExists), status=201, tensors=True,
    example={"name": "demo", "config": {"d_model": 8, "num_heads": 2}, "seed": 0}, scopes=MANAGE,
)  # fmt: skip
import_module = Operation(
    "import_module", "POST", "/v1/modules/import", ImportModule, ModuleInfo,
    "Make a module from one attention layer of a checkpoint",
    (*READS_BODY, *WRITES, errors.CheckpointNotFound, errors.InvalidCheckpoint, errors.ModuleExists), status=201,
    example={"checkpoint": "minilm", "layer": 0, "name": "minilm.0"}, scopes=MANAGE,
)  # fmt: skip
get_module = Operation(
    "get_module", "GET", "/v1/modules/{name}", None, ModuleInfo, "Config, version, device and bytes of a module",
    READS_MODULE, scopes=SEE,
)  # fmt: skip
delete_module: Operation[None] = Operation(
    "delete_module", "DELETE", "/v1/modules/{name}", None, None, "Remove a module from the device and the store",
    (*READS_MODULE, *WRITES), status=204, safe_to_repeat=False, scopes=MANAGE,
)  # fmt: skip
list_parameters = Operation(
    "list_parameters", "GET", "/v1/modules/{name}/parameters", None, ParameterList,
    "Names, shapes and statistics of a module's parameters",
    READS_MODULE, scopes=INSPECT,
)  # fmt: skip
replace_parameters = Operation(
    "replace_parameters", "PUT", "/v1/modules/{name}/parameters", ReplaceParameters, ModuleInfo,
    "Replace all parameters of a module, or none",
    (*READS_BODY, *OF_MODULE, *WRITES), tensors=True,
    example={"parameters": {f"{role}_proj.weight": [[1.0]] for role in "qkvo"}}, scopes=MANAGE,
)  # fmt: skip
get_parameter = Operation(
    "get_parameter", "GET", "/v1/modules/{name}/parameters/{parameter}", ParameterQuery, Parameter,
    "One parameter, a slice of it or one head of it",
    (*READS_MODULE, errors.ParameterNotFound), tensors=True, scopes=INSPECT,
)  # fmt: skip
forward = Operation(
    "forward", "POST", "/v1/modules/{name}/forward", ForwardRequest, ForwardReply,
    "The output of a module, and any taps",
    (*READS_BODY, *OF_MODULE, errors.KernelUnsuitable), tensors=True, pictures=("output",),
    example=_QUERY | {"return": ["output", "weights"]}, scopes=INFER,
)  # fmt: skip
weights = Operation(
    "weights", "POST", "/v1/modules/{name}/weights", WeightsRequest, WeightsReply,
    "The keys that each head of a module attends to",
    (*READS_BODY, *OF_MODULE, errors.KernelUnsuitable), tensors=True, pictures=WEIGHT_VIEWS, tables=True,
    example=_QUERY | {"top_k": 1}, scopes=INFER,
)  # fmt: skip
attribution = Operation(
    "attribution", "POST", "/v1/modules/{name}/attribution", AttributionRequest, AttributionReply,
    "The share of each weight and each head of a module in a number that depends on its output",
    (*READS_BODY, *OF_MODULE, errors.KernelUnsuitable), tensors=True, pictures=WEIGHT_VIEWS,
    example=_QUERY | {"methods": ["gradient_attention", "head_importance"]}, scopes=ASK,
)  # fmt: skip
gradients = Operation(
    "gradients", "POST", "/v1/modules/{name}/gradients", GradientsRequest, GradientsReply,
    "Exact gradients with respect to inputs, taps and parameters",
    (*READS_BODY, *OF_MODULE, errors.KernelUnsuitable), tensors=True,
    example=_QUERY | {"wrt": ["query", "weights", "parameters"]}, scopes=INFER,
)  # fmt: skip
effects = Operation(
    "effects", "POST", "/v1/modules/{name}/effects", EffectsRequest, EffectsReply,
    "The change of a module's output by each edit of a sweep: heads, queries or keys",
    (*READS_BODY, *OF_MODULE, errors.KernelUnsuitable), tensors=True, pictures=("effects",),
    example=_QUERY | {"sweep": {"tap": "context", "over": ["heads"], "set": 0}}, scopes=ASK,
)  # fmt: skip
complexity = Operation(
    "complexity", "POST", "/v1/modules/{name}/complexity", ComplexityRequest, ComplexityReply,
    "The cost of a module for one shape or a sweep of shapes",
    (*READS_BODY, *OF_MODULE, errors.KernelUnsuitable), pictures=("costs",),
    example={"shape": {"batch": 1, "queries": 512}, "sweep": {"dimension": "length", "values": [512, 1024, 2048]}},
    scopes=ASK,
)  # fmt: skip
raw_forward = Operation(
    "raw_forward", "POST", "/v1/attention/forward", RawForwardRequest, ForwardReply,
    "Attention over raw q, k and v",
    (*READS_BODY, errors.KernelUnsuitable), tensors=True, pictures=("output",),
    example=EXAMPLE_INPUTS | {"return": ["output", "weights"]}, reply_example=EXAMPLE_REPLY, scopes=INFER,
)  # fmt: skip
raw_weights = Operation(
    "raw_weights", "POST", "/v1/attention/weights", RawWeightsRequest, WeightsReply,
    "The keys that each head of raw attention attends to",
    (*READS_BODY, errors.KernelUnsuitable), tensors=True, pictures=WEIGHT_VIEWS, tables=True,
    example=EXAMPLE_INPUTS | {"top_k": 1}, scopes=INFER,
)  # fmt: skip
raw_attribution = Operation(
    "raw_attribution", "POST", "/v1/attention/attribution", RawAttributionRequest, AttributionReply,
    "The share of each weight and each head of raw attention in a number that depends on its output",
    (*READS_BODY, errors.KernelUnsuitable), tensors=True, pictures=WEIGHT_VIEWS,
    example=EXAMPLE_INPUTS | {"methods": ["relevance", "norm"]}, scopes=ASK,
)  # fmt: skip
raw_gradients = Operation(
    "raw_gradients", "POST", "/v1/attention/gradients", RawGradientsRequest, GradientsReply,
    "Exact gradients of raw attention",
    (*READS_BODY, errors.KernelUnsuitable), tensors=True,
    example=EXAMPLE_INPUTS | {"upstream": [[1.0, 0.0], [0.0, 1.0]], "wrt": ["query", "key", "value", "weights"]},
    scopes=INFER,
)  # fmt: skip
raw_effects = Operation(
    "raw_effects", "POST", "/v1/attention/effects", RawEffectsRequest, EffectsReply,
    "The change of the output of raw attention by each edit of a sweep",
    (*READS_BODY, errors.KernelUnsuitable), tensors=True, pictures=("effects",),
    example=EXAMPLE_INPUTS | {"sweep": {"tap": "weights", "over": ["keys"], "set": 0, "renormalize": True}},
    scopes=ASK,
)  # fmt: skip
raw_complexity = Operation(
    "raw_complexity", "POST", "/v1/attention/complexity", RawComplexityRequest, ComplexityReply,
    "The cost of raw attention for one shape or a sweep of shapes",
    (*READS_BODY, errors.KernelUnsuitable), pictures=("costs",),
    example={"shape": {"queries": 512}, "num_heads": 8, "head_dim": 64, "spec": {"masks": [{"name": "causal"}]}},
    scopes=ASK,
)  # fmt: skip
create_pass = Operation(
    "create_pass", "POST", "/v1/modules/{name}/passes", PassRequest, PassReply,
    "The output of a module, kept for its backward pass",
    (*READS_BODY, *OF_MODULE, errors.KernelUnsuitable), tensors=True, example=_QUERY | {"wrt": ["query", "parameters"]},
    scopes=INFER,
)  # fmt: skip
create_raw_pass = Operation(
    "create_raw_pass", "POST", "/v1/attention/passes", RawPassRequest, PassReply,
    "The output of raw attention, kept for its backward pass",
    (*READS_BODY, errors.KernelUnsuitable), tensors=True, example=EXAMPLE_INPUTS | {"wrt": ["query", "key", "value"]},
    scopes=INFER,
)  # fmt: skip
backward = Operation(
    "backward", "POST", "/v1/passes/{id}/backward", BackwardRequest, GradientsReply,
    "Exact gradients of a kept pass, which can be used once",
    (*READS_BODY, errors.PassNotFound), tensors=True, example={}, scopes=INFER,
)  # fmt: skip
accuracy = Operation(
    "accuracy", "GET", "/v1/complexity/accuracy", None, AccuracyReply,
    "Errors of predicted times, by kernel and purpose",
    (*ANY_TIME, errors.Loading, errors.Draining), scopes=INSPECT,
)  # fmt: skip
list_hardware = Operation(
    "list_hardware", "GET", "/v1/complexity/hardware", None, HardwareList,
    "Devices for which costs can be predicted from datasheets", scopes=ANY_KEY,
)  # fmt: skip
hopfield_retrieve = Operation(
    "hopfield_retrieve", "POST", "/v1/hopfield/retrieve", HopfieldRequest, HopfieldReply,
    "Modern Hopfield retrieval: update states until they reach stored patterns",
    READS_BODY, tensors=True, example=EXAMPLE_HOPFIELD, scopes=INFER,
)  # fmt: skip
circuits = Operation(
    "circuits", "POST", "/v1/modules/{name}/circuits", CircuitsRequest, CircuitsReply,
    "QK and OV circuits of a module's heads, composition scores, and spectra of its parameters",
    (*READS_BODY, *OF_MODULE), tensors=True, pictures=("spectra", "statistics", "composition"),
    example=EXAMPLE_CIRCUITS, scopes=INSPECT,
)  # fmt: skip
similarity = Operation(
    "similarity", "POST", "/v1/attention/similarity", SimilarityRequest, SimilarityReply,
    "Similarity of every pair of heads, by their weights or features",
    READS_BODY, tensors=True, pictures=("similarity",), example=EXAMPLE_SIMILARITY, scopes=ASK,
)  # fmt: skip
rollout = Operation(
    "rollout", "POST", "/v1/attention/rollout", RolloutRequest, RolloutReply,
    "Rollout or flow of attention over layers: the inputs that the state of each token comes from",
    READS_BODY, tensors=True, pictures=("rollout", "lines"), example=EXAMPLE_ROLLOUT, scopes=ASK,
)  # fmt: skip
list_models = Operation(
    "list_models", "GET", "/v1/models", None, ModelList,
    "Every loaded model, and every checkpoint that can be loaded as one", scopes=SEE,
)  # fmt: skip
load_model = Operation(
    "load_model", "POST", "/v1/models", LoadModel, ModelInfo,
    "Load a checkpoint of the model repository as a whole model",
    (*READS_BODY, errors.CheckpointNotFound, errors.InvalidCheckpoint, errors.ModelExists), status=201,
    example={"checkpoint": "tiny"}, scopes=MANAGE,
)  # fmt: skip
get_model = Operation(
    "get_model", "GET", "/v1/models/{model}", None, ModelInfo, "State, layers and memory of a whole model",
    (*ANY_TIME, *OF_MODEL), scopes=SEE,
)  # fmt: skip
unload_model: Operation[None] = Operation(
    "unload_model", "DELETE", "/v1/models/{model}", None, None, "Unload a whole model after its requests are answered",
    (*ANY_TIME, errors.ModelNotFound), status=204, safe_to_repeat=False, scopes=MANAGE,
)  # fmt: skip
model_forward = Operation(
    "model_forward", "POST", "/v1/models/{model}/forward", ModelForwardRequest, ModelForwardReply,
    "The predictions of a whole model, and any taps of any of its layers",
    (*READS_BODY, *WATCHES_MODEL, *WRITES), tensors=True,
    example=EXAMPLE_TEXT | {"top_k": 3, "return": ["logits"]}, scopes=INFER,
)  # fmt: skip
model_weights = Operation(
    "model_weights", "POST", "/v1/models/{model}/weights", ModelWeightsRequest, ModelWeightsReply,
    "The tokens that each head of each layer of a whole model attends to",
    (*READS_BODY, *WATCHES_MODEL, *WRITES), tensors=True, pictures=(*WEIGHT_VIEWS, "image"), tables=True,
    example=EXAMPLE_TEXT | {"top_k": 2, "return_weights": False}, scopes=INFER,
)  # fmt: skip
model_gradients = Operation(
    "model_gradients", "POST", "/v1/models/{model}/gradients", ModelGradientsRequest, ModelGradientsReply,
    "Exact gradients of a prediction of a whole model: by token, head, tap and hidden state",
    (*READS_BODY, *EDITS_MODEL, *WRITES), tensors=True, example=EXAMPLE_TEXT | {"wrt": ["tokens"]}, scopes=INFER,
)  # fmt: skip
model_effects = Operation(
    "model_effects", "POST", "/v1/models/{model}/effects", ModelEffectsRequest, ModelEffectsReply,
    "The change of a prediction of a whole model by each edit of a sweep, or along each path between components",
    (*READS_BODY, *EDITS_MODEL), tensors=True, pictures=("effects",),
    example=EXAMPLE_TEXT | {"sweep": {"tap": "context", "over": ["layers", "heads"], "set": 0}}, scopes=ASK,
)  # fmt: skip
model_complexity = Operation(
    "model_complexity", "POST", "/v1/models/{model}/complexity", ModelComplexityRequest, ModelComplexityReply,
    "The cost of a text or a generation for a whole model",
    (*READS_BODY, *EDITS_MODEL), example={"length": 512, "new_tokens": 64}, scopes=ASK,
)  # fmt: skip
model_context = Operation(
    "model_context", "POST", "/v1/models/{model}/context", ContextRequest, ContextReply,
    "The parts of a prompt that each sentence of an answer of a whole model comes from",
    (*READS_BODY, *OF_MODEL), tensors=True, example=EXAMPLE_CONTEXT, scopes=ASK,
)  # fmt: skip
model_similarity = Operation(
    "model_similarity", "POST", "/v1/models/{model}/similarity", TextSimilarityRequest, TextSimilarityReply,
    "The similarity of two texts by the vectors of a whole model, and the words that made it",
    (*READS_BODY, *OF_MODEL), example={"pairs": [["the cat sat", "a dog sat"]]}, scopes=ASK,
)  # fmt: skip
model_lens = Operation(
    "model_lens", "POST", "/v1/models/{model}/lens", ModelLensRequest, ModelLensReply,
    "The next tokens that states inside a whole model would predict: of layers, attentions and heads",
    (*READS_BODY, *EDITS_MODEL, errors.LensNotFound), tensors=True, pictures=("lens",),
    example=EXAMPLE_TEXT | {"top_k": 1, "positions": [-1]}, scopes=ASK,
)  # fmt: skip
fit_lens = Operation(
    "fit_lens", "POST", "/v1/models/{model}/lenses", FitLens, LensInfo,
    "Fit a Jacobian lens to a whole model over texts, or store one that was fitted elsewhere",
    (*READS_BODY, *OF_MODEL, *WRITES, errors.Conflict, errors.TooLarge), status=201, tensors=True,
    example={"texts": ["The cat sat on the mat."], "skip_first": 1}, scopes=INFER,
)  # fmt: skip
list_lenses = Operation(
    "list_lenses", "GET", "/v1/models/{model}/lenses", None, LensList,
    "The fitted lenses of a whole model, and those that are being fitted",
    (*ANY_TIME, *OF_MODEL), scopes=SEE,
)  # fmt: skip
get_lens = Operation(
    "get_lens", "GET", "/v1/lenses/{id}", None, LensInfo, "A fitted lens; as safetensors, its file with the matrices",
    (*ANY_TIME, errors.LensNotFound), tensors=True, scopes=SEE,
)  # fmt: skip
delete_lens: Operation[None] = Operation(
    "delete_lens", "DELETE", "/v1/lenses/{id}", None, None, "Remove a lens from the store, or stop its fit",
    (*ANY_TIME, *WRITES, errors.LensNotFound), status=204, safe_to_repeat=False, scopes=OWN,
)  # fmt: skip
fit_probe = Operation(
    "fit_probe", "POST", "/v1/models/{model}/probes", FitProbe, ProbeInfo,
    "Fit a linear probe to labelled texts by a feature of a whole model, or store one that was fitted elsewhere",
    (*READS_BODY, *OF_MODEL, *WRITES, errors.Conflict, errors.TooLarge), status=201, tensors=True,
    example=EXAMPLE_PROBE, scopes=INFER,
)  # fmt: skip
list_probes = Operation(
    "list_probes", "GET", "/v1/models/{model}/probes", None, ProbeList,
    "The linear probes of a whole model, and those that are being fitted",
    (*ANY_TIME, *OF_MODEL), scopes=SEE,
)  # fmt: skip
get_probe = Operation(
    "get_probe", "GET", "/v1/probes/{id}", None, ProbeInfo, "A linear probe with its weights",
    (*ANY_TIME, errors.ProbeNotFound), tensors=True, scopes=SEE,
)  # fmt: skip
delete_probe: Operation[None] = Operation(
    "delete_probe", "DELETE", "/v1/probes/{id}", None, None, "Remove a linear probe from the store, or stop its fit",
    (*ANY_TIME, *WRITES, errors.ProbeNotFound), status=204, safe_to_repeat=False, scopes=OWN,
)  # fmt: skip
fit_vector = Operation(
    "fit_vector", "POST", "/v1/models/{model}/vectors", FitVector, VectorInfo,
    "Fit a steering vector to texts of two sides by the states of a whole model, or store one that was made elsewhere",
    (*READS_BODY, *OF_MODEL, *WRITES, errors.Conflict, errors.TooLarge), status=201, tensors=True,
    example=EXAMPLE_VECTOR, scopes=INFER,
)  # fmt: skip
list_vectors = Operation(
    "list_vectors", "GET", "/v1/models/{model}/vectors", None, VectorList,
    "The steering vectors of a whole model, and those that are being fitted",
    (*ANY_TIME, *OF_MODEL), scopes=SEE,
)  # fmt: skip
get_vector = Operation(
    "get_vector", "GET", "/v1/vectors/{id}", None, VectorInfo,
    "A steering vector with its directions; by Accept as a GGUF file, which llama.cpp and repeng read",
    (*ANY_TIME, errors.VectorNotFound, errors.InvalidRequest), tensors=True, chosen=(GGUF,), scopes=SEE,
)  # fmt: skip
delete_vector: Operation[None] = Operation(
    "delete_vector", "DELETE", "/v1/vectors/{id}", None, None,
    "Remove a steering vector from the store, or stop its fit",
    (*ANY_TIME, *WRITES, errors.VectorNotFound), status=204, safe_to_repeat=False, scopes=OWN,
)  # fmt: skip
create_chat_completion = Operation(
    "create_chat_completion", "POST", "/v1/chat/completions", ChatCompletionRequest, ChatCompletion,
    "The answer of a whole model in a conversation, in OpenAI's format, with the attention that chose each token",
    (*READS_BODY, *WATCHES_MODEL, *WRITES), chosen=(EVENTS,), tables=True, example=EXAMPLE_CHAT,
    scopes=INFER,
)  # fmt: skip
create_completion = Operation(
    "create_completion", "POST", "/v1/completions", CompletionRequest, Completion,
    "The continuation of a text by a whole model, in OpenAI's format, with the attention that chose each token",
    (*READS_BODY, *WATCHES_MODEL, *WRITES), chosen=(EVENTS,), tables=True, example=EXAMPLE_COMPLETION,
    scopes=INFER,
)  # fmt: skip
create_response = Operation(
    "create_response", "POST", "/v1/responses", ResponseRequest, ModelResponse,
    "The answer of a whole model to a text or a conversation, in the format of OpenAI's Responses API",
    (*READS_BODY, *WATCHES_MODEL, *WRITES), chosen=(EVENTS,), tables=True, example=EXAMPLE_RESPONSE,
    scopes=INFER,
)  # fmt: skip
tokenize = Operation(
    "tokenize", "POST", "/v1/tokenize", TokenizeRequest, Tokenization,
    "The tokens of a text or a conversation with their places in it, in vLLM's format",
    (*READS_BODY, *OF_MODEL), example=EXAMPLE_TOKENIZATION, scopes=INFER,
)  # fmt: skip
create_embedding = Operation(
    "create_embedding", "POST", "/v1/embeddings", EmbeddingRequest, Embeddings,
    "One vector of a whole model for each text, in OpenAI's format",
    (*READS_BODY, *OF_MODEL), example={"model": "tiny", "input": "the cat sat on the mat"}, scopes=INFER,
)  # fmt: skip
rerank = Operation(
    "rerank", "POST", "/v1/rerank", RerankRequest, Ranking,
    "Documents in the order of their relevance to a query by a reranker or a model of embeddings, in vLLM's format",
    (*READS_BODY, *OF_MODEL), example=EXAMPLE_RANKING, scopes=INFER,
)  # fmt: skip
score = Operation(
    "score", "POST", "/v1/score", ScoreRequest, PairScores,
    "The scores of pairs of texts by a reranker or a model of embeddings, in vLLM's format",
    (*READS_BODY, *OF_MODEL), example=EXAMPLE_SCORES, scopes=INFER,
)  # fmt: skip
create_transcription = Operation(
    "create_transcription", "POST", "/v1/audio/transcriptions", TranscriptionRequest, Transcription,
    "The text of a sound by a whole model, in OpenAI's format, with the times of words and of each token",
    (*READS_BODY, *WATCHES_MODEL), chosen=(EVENTS, PLAIN), tables=True, form=True, example=EXAMPLE_SOUND,
    scopes=INFER,
)  # fmt: skip
list_recordings = Operation(
    "list_recordings", "GET", "/v1/recordings", None, RecordingList, "Every stored recording", scopes=SEE,
)  # fmt: skip
create_recording = Operation(
    "create_recording", "POST", "/v1/recordings", RecordingFile, RecordingInfo,
    "Store a recording: the tensors of a model for one text",
    (*READS_BODY, *WRITES, errors.TooLarge), status=201, tensors=True, example=EXAMPLE_RECORDING, scopes=INFER,
)  # fmt: skip
get_recording = Operation(
    "get_recording", "GET", "/v1/recordings/{id}", RecordingQuery, RecordingInfo,
    "The description of a recording, its whole file, or a part of one of its tensors",
    (*ANY_TIME, errors.RecordingNotFound, errors.InvalidRequest), tensors=True, scopes=SEE,
)  # fmt: skip
delete_recording: Operation[None] = Operation(
    "delete_recording", "DELETE", "/v1/recordings/{id}", None, None, "Remove a recording from the store",
    (*ANY_TIME, *WRITES, errors.RecordingNotFound), status=204, safe_to_repeat=False, scopes=OWN,
)  # fmt: skip
recording_statistics = Operation(
    "recording_statistics", "POST", "/v1/recordings/{id}/statistics", RecordingStatisticsRequest, RecordingStatistics,
    "Statistics of the recorded weights, by layer and head",
    (*READS_BODY, errors.RecordingNotFound), tensors=True, pictures=("statistics",),
    example={"statistics": ["entropy", "previous_token"]}, scopes=SEE,
)  # fmt: skip
recording_similarity = Operation(
    "recording_similarity", "POST", "/v1/recordings/{id}/similarity", RecordingSimilarityRequest,
    RecordingSimilarity, "Similarity of every pair of recorded heads or layers, of one recording or of two",
    (*READS_BODY, errors.RecordingNotFound), tensors=True, pictures=("similarity",), example={"tensor": "weights"},
    scopes=SEE,
)  # fmt: skip
recording_rollout = Operation(
    "recording_rollout", "POST", "/v1/recordings/{id}/rollout", RecordingRolloutRequest, RecordingRollout,
    "Rollout or flow of the recorded weights over layers",
    (*READS_BODY, errors.RecordingNotFound), tensors=True, pictures=("rollout", "lines"), example={"method": "rollout"},
    scopes=SEE,
)  # fmt: skip
list_sessions = Operation(
    "list_sessions", "GET", "/v1/sessions", ListSessions, SessionList,
    "Sessions page by page, as a tree, and the memory of all",
    (*ANY_TIME, errors.InvalidRequest), scopes=OWN,
)  # fmt: skip
open_session = Operation(
    "open_session", "POST", "/v1/modules/{name}/sessions", OpenSession, SessionInfo,
    "Open a session, which keeps the keys and values of earlier tokens",
    (*READS_BODY, *OF_MODULE, errors.SessionNotFound, errors.SessionGone), status=201, tensors=True,
    safe_to_repeat=False, example={"capacity": 128}, scopes=INFER,
)  # fmt: skip
get_session = Operation(
    "get_session", "GET", "/v1/sessions/{id}", None, SessionInfo, "Module, length, memory and expiry of a session",
    (*ANY_TIME, *OF_SESSION), scopes=OWN,
)  # fmt: skip
delete_session: Operation[None] = Operation(
    "delete_session", "DELETE", "/v1/sessions/{id}", None, None, "End a session and free its pages",
    (*ANY_TIME, *OF_SESSION), status=204, safe_to_repeat=False, scopes=OWN,
)  # fmt: skip
step_sessions = Operation(
    "step_sessions", "POST", "/v1/sessions/step", StepsRequest, StepsReply,
    "Steps of many sessions, each with its own result or problem",
    READS_BODY, tensors=True, safe_to_repeat=False, example={"steps": [{"session": "0", **_QUERY}]}, scopes=INFER,
)  # fmt: skip
step_session = Operation(
    "step_session", "POST", "/v1/sessions/{id}/step", StepRequest, StepReply,
    "A forward pass over new tokens, which are appended",
    (*READS_BODY, *OF_SESSION, errors.KernelUnsuitable), tensors=True, safe_to_repeat=False,
    example=_QUERY | {"return": ["output", "weights"]}, scopes=INFER,
)  # fmt: skip
fork_session = Operation(
    "fork_session", "POST", "/v1/sessions/{id}/fork", ForkSession, SessionInfo,
    "Copy a session; both share all full pages of memory",
    (*READS_BODY, *OF_SESSION), status=201, safe_to_repeat=False, example={}, scopes=INFER,
)  # fmt: skip
truncate_session = Operation(
    "truncate_session", "POST", "/v1/sessions/{id}/truncate", TruncateSession, SessionInfo,
    "Forget the last tokens of a session",
    (*READS_BODY, *OF_SESSION), example={"length": 1}, scopes=INFER,
)  # fmt: skip
reorder_session = Operation(
    "reorder_session", "POST", "/v1/sessions/{id}/reorder", ReorderSession, SessionInfo,
    "Replace the past of each sequence of a session by that of another one",
    (*READS_BODY, *OF_SESSION), safe_to_repeat=False, example={"rows": [0]}, scopes=INFER,
)  # fmt: skip
session_weights = Operation(
    "session_weights", "POST", "/v1/sessions/{id}/weights", SessionWeightsRequest, WeightsReply,
    "The keys of the cached past and of new tokens that each head attends to",
    (*READS_BODY, *OF_SESSION, errors.KernelUnsuitable), tensors=True, pictures=WEIGHT_VIEWS, tables=True,
    example=_QUERY | {"top_k": 1}, scopes=INFER,
)  # fmt: skip
session_attribution = Operation(
    "session_attribution", "POST", "/v1/sessions/{id}/attribution", SessionAttributionRequest, AttributionReply,
    "The share of each weight of new tokens over the cached past",
    (*READS_BODY, *OF_SESSION, errors.KernelUnsuitable), tensors=True, pictures=WEIGHT_VIEWS,
    example=_QUERY | {"methods": ["norm"]}, scopes=ASK,
)  # fmt: skip
session_effects = Operation(
    "session_effects", "POST", "/v1/sessions/{id}/effects", SessionEffectsRequest, EffectsReply,
    "The change of the output of new tokens over the cached past by each edit of a sweep",
    (*READS_BODY, *OF_SESSION, errors.KernelUnsuitable), tensors=True, pictures=("effects",),
    example=_QUERY | {"sweep": {"tap": "context", "over": ["heads"], "set": 0}}, scopes=ASK,
)  # fmt: skip
session_gradients = Operation(
    "session_gradients", "POST", "/v1/sessions/{id}/gradients", SessionGradientsRequest, GradientsReply,
    "Exact gradients of new tokens over the cached past",
    (*READS_BODY, *OF_SESSION, errors.KernelUnsuitable), tensors=True,
    example=_QUERY | {"wrt": ["query", "past_key", "past_value"]}, scopes=INFER,
)  # fmt: skip
get_session_cache = Operation(
    "get_session_cache", "GET", "/v1/sessions/{id}/cache", None, SessionCache,
    "The keys and values that a session holds",
    (*ANY_TIME, *OF_SESSION, errors.OverBudget, errors.Overloaded, errors.NeverFits), tensors=True, scopes=INFER,
)  # fmt: skip
put_session_cache = Operation(
    "put_session_cache", "PUT", "/v1/sessions/{id}/cache", ReplaceCache, SessionInfo,
    "Replace the past of a session",
    (*READS_BODY, *OF_SESSION), tensors=True,
    example={"past_key": [[[0.0] * 4] * 3] * 2, "past_value": [[[0.0] * 4] * 3] * 2}, scopes=INFER,
)  # fmt: skip
health_live = Operation(
    "health_live", "GET", "/health/live", None, Health, "The process answers, and its device makes progress",
    (errors.NotAcceptable, errors.Stuck), scopes=NO_KEY,
)  # fmt: skip
health_ready = Operation(
    "health_ready", "GET", "/health/ready", None, Health, "Every module is resident and the server takes work",
    (errors.NotAcceptable, errors.Loading, errors.Draining, errors.Stuck), scopes=NO_KEY,
)  # fmt: skip

OPERATIONS: Final[tuple[Operation[Any], ...]] = tuple(
    value for value in [*globals().values()] if isinstance(value, Operation)
)
"""Every operation, in the order of this file, which is that of the OpenAPI document."""
OPENAI_PATHS: Final = frozenset(
    operation.path
    for operation in OPERATIONS
    if operation.request is not None and issubclass(operation.request, OpenAIRequest)
)
"""The paths that OpenAI's API has and this service's own has not."""
