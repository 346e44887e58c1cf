"""The table of operations: method, path, request, reply and errors, each stated once.

The server makes its routes from this table, the client its calls.
"""

from dataclasses import dataclass, field
from typing import Any, Final, Generic, Literal, TypeVar, get_args

from attention_contract import errors as e
from attention_contract.base import WireModel
from attention_contract.errors import AttentionError
from attention_contract.schemas import attention as a
from attention_contract.schemas import checkpoints as k
from attention_contract.schemas import model_requests as q
from attention_contract.schemas import models as n
from attention_contract.schemas import modules as m
from attention_contract.schemas import openai as i
from attention_contract.schemas import recordings as r
from attention_contract.schemas import server as s
from attention_contract.schemas import sessions as t
from attention_contract.schemas.analyses import circuits as u
from attention_contract.schemas.analyses import hopfield as h
from attention_contract.schemas.analyses import rollout as o
from attention_contract.schemas.analyses import similarity as v
from attention_contract.schemas.analyses.attribution import AttributionReply, AttributionRequest, RawAttributionRequest
from attention_contract.schemas.analyses.context import EXAMPLE_CONTEXT, ContextReply, ContextRequest
from attention_contract.schemas.analyses.effects import EffectsReply, EffectsRequest, RawEffectsRequest
from attention_contract.schemas.analyses.lenses import FitLens, LensInfo, LensList, ModelLensReply, ModelLensRequest
from attention_contract.schemas.analyses.model_effects import ModelEffectsReply, ModelEffectsRequest
from attention_contract.schemas.analyses.recording_statistics import RecordingStatistics, RecordingStatisticsRequest
from attention_contract.schemas.costs import accuracy as y
from attention_contract.schemas.costs import complexity as c
from attention_contract.schemas.costs import hardware as w
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
from attention_contract.schemas.openai_api import responses as p
from attention_contract.schemas.openai_api import tokenization as z
from attention_contract.schemas.openai_api import transcriptions as x
from attention_contract.schemas.picture_options import WEIGHT_VIEWS, View
from attention_contract.schemas.prompts import EXAMPLE_TEXT
from attention_contract.schemas.text_similarity import TextSimilarityReply, TextSimilarityRequest
from attention_contract.schemas.weights import RawWeightsRequest, WeightsReply, WeightsRequest
from attention_contract.wire import EVENTS, PLAIN

ReplyT = TypeVar("ReplyT", bound=WireModel | None)
KeyScope = Literal["infer", "inspect", "manage", "metrics"]
Scopes = frozenset[KeyScope]
Method = Literal["GET", "POST", "PUT", "DELETE"]

ANY_TIME: Final = (e.NotAcceptable, e.InternalError, e.Unavailable)
READS_BODY: Final = (
    *ANY_TIME, e.Unreadable, e.BodyTooLarge, e.UnsupportedMediaType, e.InvalidRequest, e.OverBudget, e.Overloaded,
    e.NeverFits,
)  # fmt: skip
"""A body takes memory, like a computation."""
OF_MODULE: Final = (e.ModuleNotFound, e.VersionMismatch)
READS_MODULE: Final = (*ANY_TIME, *OF_MODULE, e.InvalidRequest)
"""The last: an If-Match that is no version."""
WRITES: Final = (e.StoreFull, e.StoreReadOnly)
OF_MODEL: Final = (e.ModelNotFound, e.InvalidCheckpoint)
"""The last: the first request loads the model."""
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
OF_SESSION: Final = (e.SessionNotFound, e.SessionGone, e.LengthMismatch, e.VersionMismatch)
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
    "server_info", "GET", "/v1", None, s.ServerInfo, "Version, device, dtypes and limits", scopes=ANY_KEY,
)  # fmt: skip
list_variants = Operation(
    "list_variants", "GET", "/v1/variants", None, s.VariantList,
    "Every registered score, mask, position, normalizer, method and kernel", scopes=ANY_KEY,
)  # fmt: skip
list_checkpoints = Operation(
    "list_checkpoints", "GET", "/v1/checkpoints", None, k.CheckpointList,
    "Every checkpoint of the model repository", scopes=SEE,
)  # fmt: skip
fetch_checkpoint = Operation(
    "fetch_checkpoint", "POST", "/v1/checkpoints", k.FetchCheckpoint, k.CheckpointReply,
    "Download a checkpoint from the Hugging Face hub into the model repository",
    (*READS_BODY, *WRITES, e.Forbidden, e.CheckpointNotFound, e.InvalidCheckpoint, e.Conflict),
    example={"repository": "sentence-transformers/all-MiniLM-L6-v2"}, scopes=MANAGE,
)  # fmt: skip
cancel_fetch: Operation[None] = Operation(
    "cancel_fetch", "DELETE", "/v1/checkpoints/{path}", None, None,
    "Stop fetching a checkpoint; nothing of it is kept, and those who wait for it get an error",
    (*ANY_TIME, e.CheckpointNotFound), status=204, safe_to_repeat=False, scopes=MANAGE,
)  # fmt: skip
get_checkpoint = Operation(
    "get_checkpoint", "GET", "/v1/checkpoints/{path}", None, k.CheckpointReply,
    "A checkpoint's family, and the config of each of its attention layers",
    (*ANY_TIME, e.CheckpointNotFound, e.InvalidCheckpoint), scopes=SEE,
)  # fmt: skip
list_modules = Operation("list_modules", "GET", "/v1/modules", None, m.ModuleList, "Every resident module", scopes=SEE)
create_module = Operation(
    "create_module", "POST", "/v1/modules", m.CreateModule, m.ModuleInfo,
    "Make a module from a seed or from its parameters",
    (*READS_BODY, *WRITES, e.ModuleExists), status=201, tensors=True,
    example={"name": "demo", "config": {"d_model": 8, "num_heads": 2}, "seed": 0}, scopes=MANAGE,
)  # fmt: skip
import_module = Operation(
    "import_module", "POST", "/v1/modules/import", m.ImportModule, m.ModuleInfo,
    "Make a module from one attention layer of a checkpoint",
    (*READS_BODY, *WRITES, e.CheckpointNotFound, e.InvalidCheckpoint, e.ModuleExists), status=201,
    example={"checkpoint": "minilm", "layer": 0, "name": "minilm.0"}, scopes=MANAGE,
)  # fmt: skip
get_module = Operation(
    "get_module", "GET", "/v1/modules/{name}", None, m.ModuleInfo, "Config, version, device and bytes of a module",
    READS_MODULE, scopes=SEE,
)  # fmt: skip
delete_module: Operation[None] = Operation(
    "delete_module", "DELETE", "/v1/modules/{name}", None, None, "Remove a module from the device and the store",
    (*READS_MODULE, *WRITES), status=204, safe_to_repeat=False, scopes=MANAGE,
)  # fmt: skip
list_parameters = Operation(
    "list_parameters", "GET", "/v1/modules/{name}/parameters", None, m.ParameterList,
    "Names, shapes and statistics of a module's parameters",
    READS_MODULE, scopes=INSPECT,
)  # fmt: skip
replace_parameters = Operation(
    "replace_parameters", "PUT", "/v1/modules/{name}/parameters", m.ReplaceParameters, m.ModuleInfo,
    "Replace all parameters of a module, or none",
    (*READS_BODY, *OF_MODULE, *WRITES), tensors=True,
    example={"parameters": {f"{role}_proj.weight": [[1.0]] for role in "qkvo"}}, scopes=MANAGE,
)  # fmt: skip
get_parameter = Operation(
    "get_parameter", "GET", "/v1/modules/{name}/parameters/{parameter}", m.ParameterQuery, m.Parameter,
    "One parameter, a slice of it or one head of it",
    (*READS_MODULE, e.ParameterNotFound), tensors=True, scopes=INSPECT,
)  # fmt: skip
forward = Operation(
    "forward", "POST", "/v1/modules/{name}/forward", a.ForwardRequest, a.ForwardReply,
    "The output of a module, and any taps",
    (*READS_BODY, *OF_MODULE, e.KernelUnsuitable), tensors=True, pictures=("output",),
    example=_QUERY | {"return": ["output", "weights"]}, scopes=INFER,
)  # fmt: skip
weights = Operation(
    "weights", "POST", "/v1/modules/{name}/weights", WeightsRequest, WeightsReply,
    "The keys that each head of a module attends to",
    (*READS_BODY, *OF_MODULE, e.KernelUnsuitable), tensors=True, pictures=WEIGHT_VIEWS, example=_QUERY | {"top_k": 1},
    scopes=INFER,
)  # fmt: skip
attribution = Operation(
    "attribution", "POST", "/v1/modules/{name}/attribution", AttributionRequest, AttributionReply,
    "The share of each weight and each head of a module in a number that depends on its output",
    (*READS_BODY, *OF_MODULE, e.KernelUnsuitable), tensors=True, pictures=WEIGHT_VIEWS,
    example=_QUERY | {"methods": ["gradient_attention", "head_importance"]}, scopes=ASK,
)  # fmt: skip
gradients = Operation(
    "gradients", "POST", "/v1/modules/{name}/gradients", GradientsRequest, GradientsReply,
    "Exact gradients with respect to inputs, taps and parameters",
    (*READS_BODY, *OF_MODULE, e.KernelUnsuitable), tensors=True,
    example=_QUERY | {"wrt": ["query", "weights", "parameters"]}, scopes=INFER,
)  # fmt: skip
effects = Operation(
    "effects", "POST", "/v1/modules/{name}/effects", EffectsRequest, EffectsReply,
    "The change of a module's output by each edit of a sweep: heads, queries or keys",
    (*READS_BODY, *OF_MODULE, e.KernelUnsuitable), tensors=True, pictures=("effects",),
    example=_QUERY | {"sweep": {"tap": "context", "over": ["heads"], "set": 0}}, scopes=ASK,
)  # fmt: skip
complexity = Operation(
    "complexity", "POST", "/v1/modules/{name}/complexity", c.ComplexityRequest, c.ComplexityReply,
    "The cost of a module for one shape or a sweep of shapes",
    (*READS_BODY, *OF_MODULE, e.KernelUnsuitable), pictures=("costs",),
    example={"shape": {"batch": 1, "queries": 512}, "sweep": {"dimension": "length", "values": [512, 1024, 2048]}},
    scopes=ASK,
)  # fmt: skip
raw_forward = Operation(
    "raw_forward", "POST", "/v1/attention/forward", a.RawForwardRequest, a.ForwardReply,
    "Attention over raw q, k and v",
    (*READS_BODY, e.KernelUnsuitable), tensors=True, pictures=("output",),
    example=a.EXAMPLE_INPUTS | {"return": ["output", "weights"]}, reply_example=a.EXAMPLE_REPLY, scopes=INFER,
)  # fmt: skip
raw_weights = Operation(
    "raw_weights", "POST", "/v1/attention/weights", RawWeightsRequest, WeightsReply,
    "The keys that each head of raw attention attends to",
    (*READS_BODY, e.KernelUnsuitable), tensors=True, pictures=WEIGHT_VIEWS, example=a.EXAMPLE_INPUTS | {"top_k": 1},
    scopes=INFER,
)  # fmt: skip
raw_attribution = Operation(
    "raw_attribution", "POST", "/v1/attention/attribution", RawAttributionRequest, AttributionReply,
    "The share of each weight and each head of raw attention in a number that depends on its output",
    (*READS_BODY, e.KernelUnsuitable), tensors=True, pictures=WEIGHT_VIEWS,
    example=a.EXAMPLE_INPUTS | {"methods": ["relevance", "norm"]}, scopes=ASK,
)  # fmt: skip
raw_gradients = Operation(
    "raw_gradients", "POST", "/v1/attention/gradients", RawGradientsRequest, GradientsReply,
    "Exact gradients of raw attention",
    (*READS_BODY, e.KernelUnsuitable), tensors=True,
    example=a.EXAMPLE_INPUTS | {"upstream": [[1.0, 0.0], [0.0, 1.0]], "wrt": ["query", "key", "value", "weights"]},
    scopes=INFER,
)  # fmt: skip
raw_effects = Operation(
    "raw_effects", "POST", "/v1/attention/effects", RawEffectsRequest, EffectsReply,
    "The change of the output of raw attention by each edit of a sweep",
    (*READS_BODY, e.KernelUnsuitable), tensors=True, pictures=("effects",),
    example=a.EXAMPLE_INPUTS | {"sweep": {"tap": "weights", "over": ["keys"], "set": 0, "renormalize": True}},
    scopes=ASK,
)  # fmt: skip
raw_complexity = Operation(
    "raw_complexity", "POST", "/v1/attention/complexity", c.RawComplexityRequest, c.ComplexityReply,
    "The cost of raw attention for one shape or a sweep of shapes",
    (*READS_BODY, e.KernelUnsuitable), pictures=("costs",),
    example={"shape": {"queries": 512}, "num_heads": 8, "head_dim": 64, "spec": {"masks": [{"name": "causal"}]}},
    scopes=ASK,
)  # fmt: skip
create_pass = Operation(
    "create_pass", "POST", "/v1/modules/{name}/passes", PassRequest, PassReply,
    "The output of a module, kept for its backward pass",
    (*READS_BODY, *OF_MODULE, e.KernelUnsuitable), tensors=True, example=_QUERY | {"wrt": ["query", "parameters"]},
    scopes=INFER,
)  # fmt: skip
create_raw_pass = Operation(
    "create_raw_pass", "POST", "/v1/attention/passes", RawPassRequest, PassReply,
    "The output of raw attention, kept for its backward pass",
    (*READS_BODY, e.KernelUnsuitable), tensors=True, example=a.EXAMPLE_INPUTS | {"wrt": ["query", "key", "value"]},
    scopes=INFER,
)  # fmt: skip
backward = Operation(
    "backward", "POST", "/v1/passes/{id}/backward", BackwardRequest, GradientsReply,
    "Exact gradients of a kept pass, which can be used once",
    (*READS_BODY, e.PassNotFound), tensors=True, example={}, scopes=INFER,
)  # fmt: skip
accuracy = Operation(
    "accuracy", "GET", "/v1/complexity/accuracy", None, y.AccuracyReply,
    "Errors of predicted times, by kernel and purpose",
    (*ANY_TIME, e.Loading, e.Draining), scopes=INSPECT,
)  # fmt: skip
list_hardware = Operation(
    "list_hardware", "GET", "/v1/complexity/hardware", None, w.HardwareList,
    "Devices for which costs can be predicted from datasheets", scopes=ANY_KEY,
)  # fmt: skip
hopfield_retrieve = Operation(
    "hopfield_retrieve", "POST", "/v1/hopfield/retrieve", h.HopfieldRequest, h.HopfieldReply,
    "Modern Hopfield retrieval: update states until they reach stored patterns",
    READS_BODY, tensors=True, example=h.EXAMPLE, scopes=INFER,
)  # fmt: skip
circuits = Operation(
    "circuits", "POST", "/v1/modules/{name}/circuits", u.CircuitsRequest, u.CircuitsReply,
    "QK and OV circuits of a module's heads, composition scores, and spectra of its parameters",
    (*READS_BODY, *OF_MODULE), tensors=True, pictures=("spectra", "statistics", "composition"), example=u.EXAMPLE,
    scopes=INSPECT,
)  # fmt: skip
similarity = Operation(
    "similarity", "POST", "/v1/attention/similarity", v.SimilarityRequest, v.SimilarityReply,
    "Similarity of every pair of heads, by their weights or features",
    READS_BODY, tensors=True, pictures=("similarity",), example=v.EXAMPLE, scopes=ASK,
)  # fmt: skip
rollout = Operation(
    "rollout", "POST", "/v1/attention/rollout", o.RolloutRequest, o.RolloutReply,
    "Rollout or flow of attention over layers: the inputs that the state of each token comes from",
    READS_BODY, tensors=True, pictures=("rollout", "lines"), example=o.EXAMPLE, scopes=ASK,
)  # fmt: skip
list_models = Operation(
    "list_models", "GET", "/v1/models", None, n.ModelList,
    "Every loaded model, and every checkpoint that can be loaded as one", scopes=SEE,
)  # fmt: skip
load_model = Operation(
    "load_model", "POST", "/v1/models", n.LoadModel, n.ModelInfo,
    "Load a checkpoint of the model repository as a whole model",
    (*READS_BODY, e.CheckpointNotFound, e.InvalidCheckpoint, e.ModelExists), status=201,
    example={"checkpoint": "tiny"}, scopes=MANAGE,
)  # fmt: skip
get_model = Operation(
    "get_model", "GET", "/v1/models/{model}", None, n.ModelInfo, "State, layers and memory of a whole model",
    (*ANY_TIME, *OF_MODEL), scopes=SEE,
)  # fmt: skip
unload_model: Operation[None] = Operation(
    "unload_model", "DELETE", "/v1/models/{model}", None, None, "Unload a whole model after its requests are answered",
    (*ANY_TIME, e.ModelNotFound), status=204, safe_to_repeat=False, scopes=MANAGE,
)  # fmt: skip
model_forward = Operation(
    "model_forward", "POST", "/v1/models/{model}/forward", q.ModelForwardRequest, q.ModelForwardReply,
    "The predictions of a whole model, and any taps of any of its layers",
    (*READS_BODY, *OF_MODEL, *WRITES), tensors=True,
    example=EXAMPLE_TEXT | {"top_k": 3, "return": ["logits"]}, scopes=INFER,
)  # fmt: skip
model_weights = Operation(
    "model_weights", "POST", "/v1/models/{model}/weights", q.ModelWeightsRequest, q.ModelWeightsReply,
    "The tokens that each head of each layer of a whole model attends to",
    (*READS_BODY, *OF_MODEL, *WRITES), tensors=True, pictures=(*WEIGHT_VIEWS, "image"),
    example=EXAMPLE_TEXT | {"top_k": 2, "return_weights": False}, scopes=INFER,
)  # fmt: skip
model_gradients = Operation(
    "model_gradients", "POST", "/v1/models/{model}/gradients", q.ModelGradientsRequest, q.ModelGradientsReply,
    "Exact gradients of a prediction of a whole model: by token, head, tap and hidden state",
    (*READS_BODY, *OF_MODEL, *WRITES), tensors=True, example=EXAMPLE_TEXT | {"wrt": ["tokens"]}, scopes=INFER,
)  # fmt: skip
model_effects = Operation(
    "model_effects", "POST", "/v1/models/{model}/effects", ModelEffectsRequest, ModelEffectsReply,
    "The change of a prediction of a whole model by each edit of a sweep, or along each path between components",
    (*READS_BODY, *OF_MODEL), tensors=True, pictures=("effects",),
    example=EXAMPLE_TEXT | {"sweep": {"tap": "context", "over": ["layers", "heads"], "set": 0}}, scopes=ASK,
)  # fmt: skip
model_complexity = Operation(
    "model_complexity", "POST", "/v1/models/{model}/complexity", ModelComplexityRequest, ModelComplexityReply,
    "The cost of a text or a generation for a whole model",
    (*READS_BODY, *OF_MODEL), example={"length": 512, "new_tokens": 64}, scopes=ASK,
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
    (*READS_BODY, *OF_MODEL, e.LensNotFound), tensors=True, pictures=("lens",),
    example=EXAMPLE_TEXT | {"top_k": 1, "positions": [-1]}, scopes=ASK,
)  # fmt: skip
fit_lens = Operation(
    "fit_lens", "POST", "/v1/models/{model}/lenses", FitLens, LensInfo,
    "Fit a Jacobian lens to a whole model over texts, or store one that was fitted elsewhere",
    (*READS_BODY, *OF_MODEL, *WRITES, e.Conflict, e.TooLarge), status=201, tensors=True,
    example={"texts": ["The cat sat on the mat."], "skip_first": 1}, scopes=INFER,
)  # fmt: skip
list_lenses = Operation(
    "list_lenses", "GET", "/v1/models/{model}/lenses", None, LensList,
    "The fitted lenses of a whole model, and those that are being fitted",
    (*ANY_TIME, *OF_MODEL), scopes=SEE,
)  # fmt: skip
delete_lens: Operation[None] = Operation(
    "delete_lens", "DELETE", "/v1/lenses/{id}", None, None, "Remove a lens from the store, or stop its fit",
    (*ANY_TIME, *WRITES, e.LensNotFound), status=204, safe_to_repeat=False, scopes=OWN,
)  # fmt: skip
create_chat_completion = Operation(
    "create_chat_completion", "POST", "/v1/chat/completions", i.ChatCompletionRequest, i.ChatCompletion,
    "The answer of a whole model in a conversation, in OpenAI's format, with the attention that chose each token",
    (*READS_BODY, *OF_MODEL, *WRITES), chosen=(EVENTS,), example=i.EXAMPLE_CHAT, scopes=INFER,
)  # fmt: skip
create_completion = Operation(
    "create_completion", "POST", "/v1/completions", i.CompletionRequest, i.Completion,
    "The continuation of a text by a whole model, in OpenAI's format, with the attention that chose each token",
    (*READS_BODY, *OF_MODEL, *WRITES), chosen=(EVENTS,), example=i.EXAMPLE_TEXT, scopes=INFER,
)  # fmt: skip
create_response = Operation(
    "create_response", "POST", "/v1/responses", p.ResponseRequest, p.ModelResponse,
    "The answer of a whole model to a text or a conversation, in the format of OpenAI's Responses API",
    (*READS_BODY, *OF_MODEL, *WRITES), chosen=(EVENTS,), example=p.EXAMPLE, scopes=INFER,
)  # fmt: skip
tokenize = Operation(
    "tokenize", "POST", "/v1/tokenize", z.TokenizeRequest, z.Tokenization,
    "The tokens of a text or a conversation with their places in it, in vLLM's format",
    (*READS_BODY, *OF_MODEL), example=z.EXAMPLE, scopes=INFER,
)  # fmt: skip
create_embedding = Operation(
    "create_embedding", "POST", "/v1/embeddings", i.EmbeddingRequest, i.Embeddings,
    "One vector of a whole model for each text, in OpenAI's format",
    (*READS_BODY, *OF_MODEL), example={"model": "tiny", "input": "the cat sat on the mat"}, scopes=INFER,
)  # fmt: skip
create_transcription = Operation(
    "create_transcription", "POST", "/v1/audio/transcriptions", x.TranscriptionRequest, x.Transcription,
    "The text of a sound by a whole model, in OpenAI's format, with the times of words and of each token",
    (*READS_BODY, *OF_MODEL), chosen=(EVENTS, PLAIN), form=True, example=x.EXAMPLE_SOUND, scopes=INFER,
)  # fmt: skip
list_recordings = Operation(
    "list_recordings", "GET", "/v1/recordings", None, r.RecordingList, "Every stored recording", scopes=SEE,
)  # fmt: skip
create_recording = Operation(
    "create_recording", "POST", "/v1/recordings", r.RecordingFile, r.RecordingInfo,
    "Store a recording: the tensors of a model for one text",
    (*READS_BODY, *WRITES, e.TooLarge), status=201, tensors=True, example=r.EXAMPLE, scopes=INFER,
)  # fmt: skip
get_recording = Operation(
    "get_recording", "GET", "/v1/recordings/{id}", r.RecordingQuery, r.RecordingInfo,
    "The description of a recording, its whole file, or a part of one of its tensors",
    (*ANY_TIME, e.RecordingNotFound, e.InvalidRequest), tensors=True, scopes=SEE,
)  # fmt: skip
delete_recording: Operation[None] = Operation(
    "delete_recording", "DELETE", "/v1/recordings/{id}", None, None, "Remove a recording from the store",
    (*ANY_TIME, *WRITES, e.RecordingNotFound), status=204, safe_to_repeat=False, scopes=OWN,
)  # fmt: skip
recording_statistics = Operation(
    "recording_statistics", "POST", "/v1/recordings/{id}/statistics", RecordingStatisticsRequest, RecordingStatistics,
    "Statistics of the recorded weights, by layer and head",
    (*READS_BODY, e.RecordingNotFound), tensors=True, pictures=("statistics",),
    example={"statistics": ["entropy", "previous_token"]}, scopes=SEE,
)  # fmt: skip
recording_similarity = Operation(
    "recording_similarity", "POST", "/v1/recordings/{id}/similarity", v.RecordingSimilarityRequest,
    v.RecordingSimilarity, "Similarity of every pair of recorded heads or layers, of one recording or of two",
    (*READS_BODY, e.RecordingNotFound), tensors=True, pictures=("similarity",), example={"tensor": "weights"},
    scopes=SEE,
)  # fmt: skip
recording_rollout = Operation(
    "recording_rollout", "POST", "/v1/recordings/{id}/rollout", o.RecordingRolloutRequest, o.RecordingRollout,
    "Rollout or flow of the recorded weights over layers",
    (*READS_BODY, e.RecordingNotFound), tensors=True, pictures=("rollout", "lines"), example={"method": "rollout"},
    scopes=SEE,
)  # fmt: skip
list_sessions = Operation(
    "list_sessions", "GET", "/v1/sessions", t.ListSessions, t.SessionList,
    "Sessions page by page, as a tree, and the memory of all",
    (*ANY_TIME, e.InvalidRequest), scopes=OWN,
)  # fmt: skip
open_session = Operation(
    "open_session", "POST", "/v1/modules/{name}/sessions", t.OpenSession, t.SessionInfo,
    "Open a session, which keeps the keys and values of earlier tokens",
    (*READS_BODY, *OF_MODULE, e.SessionNotFound, e.SessionGone), status=201, tensors=True, safe_to_repeat=False,
    example={"capacity": 128}, scopes=INFER,
)  # fmt: skip
get_session = Operation(
    "get_session", "GET", "/v1/sessions/{id}", None, t.SessionInfo, "Module, length, memory and expiry of a session",
    (*ANY_TIME, *OF_SESSION), scopes=OWN,
)  # fmt: skip
delete_session: Operation[None] = Operation(
    "delete_session", "DELETE", "/v1/sessions/{id}", None, None, "End a session and free its pages",
    (*ANY_TIME, *OF_SESSION), status=204, safe_to_repeat=False, scopes=OWN,
)  # fmt: skip
step_sessions = Operation(
    "step_sessions", "POST", "/v1/sessions/step", t.StepsRequest, t.StepsReply,
    "Steps of many sessions, each with its own result or problem",
    READS_BODY, tensors=True, safe_to_repeat=False, example={"steps": [{"session": "0", **_QUERY}]}, scopes=INFER,
)  # fmt: skip
step_session = Operation(
    "step_session", "POST", "/v1/sessions/{id}/step", t.StepRequest, t.StepReply,
    "A forward pass over new tokens, which are appended",
    (*READS_BODY, *OF_SESSION, e.KernelUnsuitable), tensors=True, safe_to_repeat=False,
    example=_QUERY | {"return": ["output", "weights"]}, scopes=INFER,
)  # fmt: skip
fork_session = Operation(
    "fork_session", "POST", "/v1/sessions/{id}/fork", t.ForkSession, t.SessionInfo,
    "Copy a session; both share all full pages of memory",
    (*READS_BODY, *OF_SESSION), status=201, safe_to_repeat=False, example={}, scopes=INFER,
)  # fmt: skip
truncate_session = Operation(
    "truncate_session", "POST", "/v1/sessions/{id}/truncate", t.TruncateSession, t.SessionInfo,
    "Forget the last tokens of a session",
    (*READS_BODY, *OF_SESSION), example={"length": 1}, scopes=INFER,
)  # fmt: skip
reorder_session = Operation(
    "reorder_session", "POST", "/v1/sessions/{id}/reorder", t.ReorderSession, t.SessionInfo,
    "Replace the past of each sequence of a session by that of another one",
    (*READS_BODY, *OF_SESSION), safe_to_repeat=False, example={"rows": [0]}, scopes=INFER,
)  # fmt: skip
session_weights = Operation(
    "session_weights", "POST", "/v1/sessions/{id}/weights", t.SessionWeightsRequest, WeightsReply,
    "The keys of the cached past and of new tokens that each head attends to",
    (*READS_BODY, *OF_SESSION, e.KernelUnsuitable), tensors=True, pictures=WEIGHT_VIEWS, example=_QUERY | {"top_k": 1},
    scopes=INFER,
)  # fmt: skip
session_attribution = Operation(
    "session_attribution", "POST", "/v1/sessions/{id}/attribution", t.SessionAttributionRequest, AttributionReply,
    "The share of each weight of new tokens over the cached past",
    (*READS_BODY, *OF_SESSION, e.KernelUnsuitable), tensors=True, pictures=WEIGHT_VIEWS,
    example=_QUERY | {"methods": ["norm"]}, scopes=ASK,
)  # fmt: skip
session_effects = Operation(
    "session_effects", "POST", "/v1/sessions/{id}/effects", t.SessionEffectsRequest, EffectsReply,
    "The change of the output of new tokens over the cached past by each edit of a sweep",
    (*READS_BODY, *OF_SESSION, e.KernelUnsuitable), tensors=True, pictures=("effects",),
    example=_QUERY | {"sweep": {"tap": "context", "over": ["heads"], "set": 0}}, scopes=ASK,
)  # fmt: skip
session_gradients = Operation(
    "session_gradients", "POST", "/v1/sessions/{id}/gradients", t.SessionGradientsRequest, GradientsReply,
    "Exact gradients of new tokens over the cached past",
    (*READS_BODY, *OF_SESSION, e.KernelUnsuitable), tensors=True,
    example=_QUERY | {"wrt": ["query", "past_key", "past_value"]}, scopes=INFER,
)  # fmt: skip
get_session_cache = Operation(
    "get_session_cache", "GET", "/v1/sessions/{id}/cache", None, t.SessionCache,
    "The keys and values that a session holds",
    (*ANY_TIME, *OF_SESSION, e.OverBudget, e.Overloaded, e.NeverFits), tensors=True, scopes=INFER,
)  # fmt: skip
put_session_cache = Operation(
    "put_session_cache", "PUT", "/v1/sessions/{id}/cache", t.ReplaceCache, t.SessionInfo,
    "Replace the past of a session",
    (*READS_BODY, *OF_SESSION), tensors=True,
    example={"past_key": [[[0.0] * 4] * 3] * 2, "past_value": [[[0.0] * 4] * 3] * 2}, scopes=INFER,
)  # fmt: skip
health_live = Operation(
    "health_live", "GET", "/health/live", None, s.Health, "The process answers, and its device makes progress",
    (e.NotAcceptable, e.Stuck), scopes=NO_KEY,
)  # fmt: skip
health_ready = Operation(
    "health_ready", "GET", "/health/ready", None, s.Health, "Every module is resident and the server takes work",
    (e.NotAcceptable, e.Loading, e.Draining, e.Stuck), scopes=NO_KEY,
)  # fmt: skip

OPERATIONS: Final[tuple[Operation[Any], ...]] = tuple(
    each for each in [*globals().values()] if isinstance(each, Operation)
)
"""Every operation, in the order of this file, which is that of the OpenAPI document."""
OPENAI_PATHS: Final = frozenset(
    each.path for each in OPERATIONS if each.request is not None and issubclass(each.request, i.OpenAIRequest)
)
"""The paths that OpenAI's API has and this service's own has not."""
