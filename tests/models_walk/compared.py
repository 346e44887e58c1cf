"""One model type, built small: its whole pass, weights, gradients and generated tokens beside its eager self."""

import copy
import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import orjson
import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    GenerationConfig,
    PreTrainedModel,
    Siglip2ImageProcessorPil,
    ViTImageProcessorPil,
    WhisperFeatureExtractor,
)
from transformers.models.auto import modeling_auto
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.utils import logging

from attention_contract.errors import AttentionError, InvalidRequest
from attention_contract.schemas.attention import Edit
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest
from attention_contract.schemas.modules import ImportModule
from attention_contract.schemas.openai import Completion, CompletionRequest
from attention_contract.schemas.text_similarity import TextSimilarityRequest
from attention_contract.validation import validate
from attention_contract.wire import to_json
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.answers.pair_similarity import pair_similarity_reply, plan_pair_similarity
from attention_service.models.generation.decoder import Decoder
from attention_service.models.generation.generation import Generation, decode, generate, read_prompts
from attention_service.models.generation.generation_plan import plan_generation
from attention_service.models.generation.running_text import RunningText
from attention_service.models.head_kinds import head_kind
from attention_service.models.input_kinds import PAIRS
from attention_service.models.inputs.images.encoder_inputs import EncoderInputs
from attention_service.models.inputs.images.pair_inputs import PairInputs
from attention_service.models.inputs.images.prompt_inputs import image_tokens
from attention_service.models.inputs.model_limits import SOUND
from attention_service.models.inputs.sounds.sound_inputs import SoundInputs
from attention_service.models.loaded.checked_request import check_request
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_loading import VISION_HALVES as _VISION
from attention_service.models.passes.attention_pass import AttentionPass, LayerTask
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.models.passes.layer_states import LayerStates
from attention_service.models.passes.unrun_models import NOT_RUNNING
from attention_service.modules.checkpoints.import_plan import plan
from attention_service.runtime.device.torch_device import Device
from attention_transformers.model_layers import LayerKey, attention_modules
from tests.client.tiny_models import tokenizer
from tests.models.inputs.images.small_encoders import noise, sent
from tests.models.inputs.sounds import small_sounds as sounds
from tests.models_walk.implicit import implicit_error
from tests.models_walk.joined import joined
from tests.models_walk.own_windows import dense
from tests.models_walk.questions import QUESTIONS
from tests.models_walk.small_configs import small_config

IDS: Final = [5, 3, 7, 8, 6, 4, 9, 10, 11]
PROMPTS: Final = [[3, 4, 5], [8, 3, 7, 9, 10], [6]]
NEW: Final = 6
SAMPLED: Final = {"temperature": 0.7, "top_p": 0.9, "seed": 5}
CLOSE: Final = 1e-4
"""The largest difference that counts as equal, as a share of the largest number that is compared."""
READ: Final = frozenset({"input_ids", "pixel_values", *SOUND})
"""The inputs of the models that are compared."""
MOST: Final = 100_000_000
"""The most parameters of a model that is built."""
SECONDS: Final = 120
"""Seconds for one type."""
_HEADS: Final = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_MAPPING_NAMES",
)  # fmt: skip
"""The classes of a model type in the order in which the first is taken."""


_FORMS: Final = {
    "classes": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "tokens": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "answers": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "choice": "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",
    "images": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "objects": "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES",
}  # fmt: skip
"""The classes of other heads."""


@dataclass
class Found:
    """What the comparison of one model type found. Errors are shares of the largest number; None: not compared."""

    kind: str
    architecture: str = ""
    whole: float | None = None
    weights: float | None = None
    gradients: float | None = None
    generated: bool | None = None
    """True if greedy and drawn tokens of three prompts are those of transformers for each alone."""
    joined: str | None = None
    """Which of its texts share passes: those ``unlike`` in length, those ``alike``, or ``no``."""
    apart: float | None = None
    """The largest difference of joined logits from those of the same texts alone."""
    family: str = ""
    """The family by which its layers are imported as modules."""
    layers: int = 0
    """The attentions of the model."""
    invariants: float | None = None
    """The largest error of what holds whatever the model is: see ``_invariants``."""
    way: str = ""
    """How its attentions are seen: ``computed`` or ``observed``; a dash without attentions."""
    forms: Sequence[str] = ()
    """The heads with which checkpoints of the type open, besides that for tokens."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why a part is not compared, or not equal."""
    asked: dict[str, float] = field(default_factory=dict)
    """The error of each younger question (``questions``) that the type answers."""
    refused: dict[str, str] = field(default_factory=dict)
    """The reason for which it refuses one; a fault is one of ``reasons``."""
    implicit: float | None = None
    """The largest difference of implicit weights times values from the layer's own output, in float64."""

    @property
    def equal(self) -> bool:
        """True if the whole pass gives the eager model's numbers."""
        return self.whole is not None and self.whole < CLOSE


def kinds() -> list[str]:
    """Return every model type that predicts tokens or reads tokens, pixels or sounds; those that predict come first."""
    predict = dict.fromkeys(kind for mapping in _HEADS[:-1] for kind in getattr(modeling_auto, mapping))
    others = [kind for kind in getattr(modeling_auto, _HEADS[-1]) if kind not in predict]
    return [*predict, *(kind for kind in others if reads(kind) in READ)]


def forms_of(kind: str) -> list[str]:
    """Return the kinds of other heads that transformers has for a model type, and that the service opens."""
    named = {form: getattr(modeling_auto, mapping).get(kind) for form, mapping in _FORMS.items()}
    classes = {form: [each] if isinstance(each, str) else [*(each or ())] for form, each in named.items()}
    return [form for form, names in classes.items() if any(head_kind(name) is not None for name in names)]


@cache
def class_of(kind: str) -> Any:
    """Return the class of a model type that is compared, if it has one.

    Of a pair of encoders that is loaded as such both; of others the one of images.
    """
    mapping = next(mapping for mapping in _HEADS if kind in getattr(modeling_auto, mapping))
    names = getattr(modeling_auto, mapping)[kind]
    name = names if isinstance(names, str) else names[0]
    try:
        config = CONFIG_MAPPING[kind]()
    except Exception:  # one that needs entries
        config = None
    pair = kind not in PAIRS and config is not None and not image_tokens(config)
    pair = pair and {"vision_config", "text_config"} <= vars(config).keys()
    halves = [name.removesuffix("Model") + end for end in _VISION] if pair else []
    return next((found for each in (*halves, name) if (found := getattr(transformers, each, None)) is not None), None)


def reads(kind: str) -> str:
    """Return the name of the input of a model type."""
    try:
        return str(getattr(class_of(kind), "main_input_name", "nothing that is known"))
    except ImportError:
        return "what needs another package"


def built(kind: str, **entries: Any) -> PreTrainedModel:
    """Return a small model of a type with sharp random parameters, the same in every run.

    ``entries``: of its config, other than small ones.
    """
    config, auto = small_config(kind), class_of(kind)
    for name, value in entries.items():
        setattr(config, name, value)
    if auto.__name__.endswith(_VISION) and not isinstance(config, auto.config_class):
        config.vision_config.projection_dim = getattr(config, "projection_dim", None)
        config = config.vision_config
    text = config.get_text_config(decoder=True)
    if not isinstance(config, auto.config_class) and (
        isinstance(text, auto.config_class) or not hasattr(config, "vision_config")
    ):
        config = text
    torch.manual_seed(7)
    with torch.device("meta"):
        count = sum(each.numel() for each in auto._from_config(copy.deepcopy(config)).parameters())
    if count > MOST:
        raise ValueError(f"its smallest config has {count} parameters")
    torch.manual_seed(7)
    model: PreTrainedModel = auto._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 or "sinks" in name:
                width = parameter[0].numel() if parameter.ndim == 4 else parameter.shape[-1]
                parameter.normal_(std=min(0.3, width**-0.5 * (1.0 if parameter.ndim == 4 else 1.7)))
    return model.float()


def prepare() -> None:
    """Make a process quiet and use one thread."""
    torch.set_num_threads(1)
    logs: Any = logging
    logs.set_verbosity_error()
    logs.disable_progress_bar()


def limited(kind: str, device: str = "cpu") -> Found:
    """Compare one type on a device, within its time."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"it took more than {SECONDS} seconds")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        return compared(kind, device)
    finally:
        signal.alarm(0)


def compared(kind: str, device: str = "cpu") -> Found:
    """Compare every part of one model type; both models are on the device."""
    found = Found(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if (reading := reads(kind)) not in READ:
            found.architecture = class_of(kind).__name__
            found.reasons["whole"] = f"it reads {reading}"
            return found
        try:
            model = built(kind).to(device)
        except Exception as fault:
            found.reasons["whole"] = f"not built small: {short_error(fault)}"
            return found
        found.architecture = type(model).__name__
        try:
            own = copy.deepcopy(model).requires_grad_(False)
            loaded = LoadedModel(kind, own, tokenizer(), Device.open(device), processor_of(model))
        except AttentionError as fault:
            found.reasons["whole"] = short_error(fault)
            return found
        except Exception as fault:
            found.reasons["whole"] = f"fault: {short_error(fault)}"
            return found
        found.layers, found.forms = len(loaded.places), forms_of(kind)
        found.way = loaded.attention.way if loaded.places else "–"
        for part, compare in _PARTS.items():
            try:
                compare(found, model, loaded)
            except Exception as fault:
                found.reasons[part] = short_error(fault)
        if asks_younger(model, loaded):
            for name, ask in QUESTIONS.items():
                try:
                    found.asked[name] = ask(model, loaded)
                except AttentionError as fault:
                    found.refused[name] = short_error(fault)
                except Exception as fault:
                    found.reasons[name] = f"fault: {short_error(fault)}"
        loaded.close()
    return found


def asks_younger(model: PreTrainedModel, loaded: LoadedModel) -> bool:
    """True for a model that reads the tokens of a text, which the younger questions are asked of."""
    return model.main_input_name == "input_ids" and not isinstance(loaded.reader, PairInputs)


def short_error(fault: BaseException) -> str:
    """Return the first sentence of an error on one line."""
    text = getattr(fault, "detail", None) or f"{type(fault).__name__}: {fault}"
    if isinstance(fault, ImportError) and (package := re.search(r"requires the (\S+) library", str(fault))):
        text = f"it needs {package[1]}, which is not installed here"
    return " ".join(str(text).split())[:240]


def error(found: Any, expected: Any) -> float:
    """Return the largest difference as a share of the largest expected number."""
    a, b = (np.asarray(x.detach().cpu() if isinstance(x, torch.Tensor) else x, np.float64) for x in (found, expected))
    if a.shape != b.shape:
        raise ValueError(f"shapes {a.shape} and {b.shape}")
    finite = np.isfinite(b)
    if not np.array_equal(finite, np.isfinite(a)):
        return float("inf")
    return float(abs(a - b)[finite].max(initial=0) / max(abs(b)[finite].max(initial=0), 1e-30))


_SECONDS = 1.95
"""Seconds of a sound whose frames are all real in Parakeet, where those of padding have weights that nobody reads."""


def processor_of(model: PreTrainedModel) -> Any:
    """Return the processor of images, of the model's size or of four patches, or of sounds."""
    if model.config.model_type in PAIRS:
        return _pictures(model.config.vision_config)
    if model.main_input_name == "input_features":
        return _extractor(model.config)
    if model.main_input_name == "input_values":
        kind = model.config.model_type
        return sounds.extractor(kind if kind in sounds.HEARS else "wav2vec2")
    return _pictures(model.config) if model.main_input_name == "pixel_values" else None


def _pictures(config: Any) -> Any:
    if config.model_type.startswith("siglip2"):
        return Siglip2ImageProcessorPil(patch_size=config.patch_size, max_num_patches=16)
    size = getattr(config, "image_size", None) or (64 if hasattr(config, "backbone_config") else 8)
    height, width = (size, size) if isinstance(size, int) else size[-2:]
    return ViTImageProcessorPil(size={"height": height, "width": width})


def _extractor(config: Any) -> Any:
    """Return the feature extractor of a type, or of the type that it is the encoder of; else that of Whisper."""
    kind, known = config.model_type, FEATURE_EXTRACTOR_MAPPING_NAMES
    name = known.get(max((each for each in known if kind.startswith(each)), key=len, default=""))
    make = getattr(transformers, name or "WhisperFeatureExtractor")
    own = getattr(config, "encoder_config", config)
    size = getattr(own, "num_mel_bins", None) or getattr(config, "feature_size", 80)
    return make(feature_size=size, **({"chunk_length": 6} if make is WhisperFeatureExtractor else {}))


def input_of(loaded: LoadedModel) -> dict[str, Any]:
    """Return the text of ``IDS``, an image or a sound for a model that reads one, or a text and an image for a pair."""
    if isinstance(loaded.reader, PairInputs):
        return {"tokens": IDS, "images": [sent(noise(24, 16))]}
    if isinstance(loaded.reader, SoundInputs):
        return {"audio": [sounds.sent(sounds.speech(_SECONDS))]}
    if not isinstance(loaded.reader, EncoderInputs):
        return {"tokens": IDS}
    return {"images": [sent(noise(24, 16))]}


def arguments_of(loaded: LoadedModel) -> dict[str, Any]:
    """Return the arguments of an eager run over the text or the image."""
    cache = {"use_cache": False} if "use_cache" in loaded.reader.names else {}
    checked = check_request(loaded, ModelForwardRequest(**input_of(loaded)))
    return checked.inputs.arguments | cache | {"return_dict": True}


def _whole(found: Found, model: PreTrainedModel, loaded: LoadedModel) -> None:
    if isinstance(loaded.reader, PairInputs):
        found.whole = _pair_error(model, loaded)
        return
    with torch.no_grad():
        expected = model(**arguments_of(loaded))
        output = loaded.run(
            check_request(loaded, ModelForwardRequest(**input_of(loaded))).inputs.arguments, AttentionPass({})
        )
    name = _result_of(expected)
    found.whole = max(map(error, tensors(output[name]), tensors(expected[name])))
    if not found.equal:
        model.set_attn_implementation("sdpa")
        with torch.no_grad():
            own = error(model(**arguments_of(loaded))[name], output[name])
        model.set_attn_implementation("eager")
        if own < CLOSE and found.way == "computed":
            found.reasons["whole"] = (
                f"it differs by {found.whole:.0e} from eager attention, as its own sdpa does in transformers"
            )


def _pair_error(model: PreTrainedModel, loaded: LoadedModel) -> float:
    """The largest difference of the vectors of a text and of an image, and of their cosine."""
    pair: Any = model
    own, named = arguments_of(loaded), [{"tokens": IDS}, {"images": [sent(noise(24, 16))]}]
    texts = {name: x for name, x in own.items() if name in {"input_ids", "attention_mask"}}
    pixels = {name: x for name, x in own.items() if name not in texts and name not in {"return_dict", "use_cache"}}
    with torch.no_grad():
        expected = [pair.get_text_features(**texts), pair.get_image_features(**pixels)]
    vectors = [each.pooler_output[0] for each in expected]
    replies = [forward_reply(loaded, ModelForwardRequest(**given, return_=["pooled"])) for given in named]
    request = TextSimilarityRequest(pairs=[["the cat sat", named[1]["images"][0]]])
    similarity = pair_similarity_reply(loaded, request, plan_pair_similarity(loaded, request)).similarity
    with torch.no_grad():
        ids = check_request(loaded, ModelForwardRequest(text="the cat sat")).inputs.arguments["input_ids"]
        text = pair.get_text_features(ids).pooler_output[0]
    cosine = torch.cosine_similarity(text, vectors[1], dim=0)
    return max(
        abs(similarity[0] - float(cosine)), *(error(x.pooled, own) for x, own in zip(replies, vectors, strict=True))
    )


def _result_of(output: Any) -> str:
    """The name of what a model computes of a whole text or image."""
    named = ("logits", "last_hidden_state", "pooler_output", "image_embeds")
    known = next((name for name in named if isinstance(getattr(output, name, None), torch.Tensor)), None)
    return known or next(name for name in output if tensors(output[name]))


def _weights(found: Found, model: PreTrainedModel, loaded: LoadedModel) -> None:
    if not loaded.places:
        return
    request = ModelForwardRequest(**input_of(loaded), layers=_attentions(loaded), return_=["weights"])
    if found.way == "observed":
        returned = returned_weights(model, arguments_of(loaded))
        layers = [np.asarray(layer.weights) for layer in forward_reply(loaded, request).layers]
        apart = [[_apart(x, own) for own in returned if _is_over(x, own)] for x in layers]
        if all(apart) and len(returned) < len(layers):
            found.reasons["weights"] = "the model returns those of some layers; others are compared by their products"
            apart = [[_apart(x, own) for x in layers if _is_over(x, own)] for own in returned]
        if all(apart) and apart:
            found.weights = max(map(min, apart))
        else:
            found.reasons["weights"] = "the model returns none; those are compared by their products with the values"
        return
    arguments = arguments_of(loaded)
    run = loaded.reader.module(model, arguments)
    expected = eager_weights(model, arguments, run, of_batches=_has_windows(loaded))
    layers = forward_reply(loaded, request).layers
    pairs = [(np.asarray(layer.weights).reshape(own.shape), own) for layer, own in zip(layers, expected, strict=True)]
    errors = [error(weights, own) for weights, own in pairs]
    if max(errors) > CLOSE:
        shares = [error(weights / weights.sum(-1, keepdims=True), own) for weights, own in pairs]
        if max(shares) < CLOSE:
            found.reasons["weights"] = "eager weights leave the sink out: compared as shares of each row"
            errors = shares
    found.weights = max(errors)


def _is_over(weights: np.ndarray, own: torch.Tensor) -> bool:
    """True if both are of the same pairs, whether or not with a batch of one image."""
    return own.shape[-2:] == weights.shape[-2:] and own.numel() == weights.size


def _apart(weights: np.ndarray, own: torch.Tensor) -> float:
    """The difference of weights from those of a model, or of their means over heads if it returns these (WavLM)."""
    own = own.reshape(weights.shape)
    means = own.shape[0] > 1 and torch.equal(own, own[:1].expand(own.shape))
    return error(np.broadcast_to(weights.mean(0, keepdims=True), weights.shape) if means else weights, own)


def _attentions(loaded: LoadedModel) -> list[LayerKey]:
    """The layers that attend by a normalizer over pairs."""
    return [place.key for place in loaded.places.values()]


def _implicit(found: Found, model: PreTrainedModel, loaded: LoadedModel) -> None:
    if loaded.implicit:
        found.implicit = implicit_error(found.kind, model.cpu(), IDS)
        model.to(loaded.device.torch)


def returned_weights(model: PreTrainedModel, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """Return the weights ``[H, Lq, Lk]``, or ``[B, H, Lq, Lk]`` of images, that a model returns itself."""
    try:
        with torch.no_grad():
            output = model(**arguments, output_attentions=True)
    except NOT_RUNNING:  # a fault of transformers, as of MaskFormer's Swin
        return []
    attentions = [x for name in output for x in tensors(output[name]) if "attentions" in name and bool((x >= 0).all())]
    attentions = [x.transpose(1, 2).flatten(0, 1) if x.ndim == 5 else x for x in attentions]  # of Hiera's windows
    windows = getattr(model.config, "attention_window", None)
    if windows is not None:  # of Longformer and LED's encoder, without global tokens
        width = windows[0] + 1
        attentions = [dense(x, width // 2) if x.shape[3] == width != x.shape[2] else x for x in attentions]
    return attentions if model.main_input_name == "pixel_values" else [x[0] for x in attentions]


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of nested tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for each in value for x in tensors(each)] if isinstance(value, tuple | list) else []


def _has_windows(loaded: LoadedModel) -> bool:
    return any(place.windows is not None for place in loaded.places.values())


def eager_weights(
    model: PreTrainedModel,
    arguments: dict[str, Any],
    run: Callable[..., Any] | None = None,
    *,
    of_batches: bool = False,
) -> list[torch.Tensor]:
    """Return the weights ``[H, Lq, Lk]`` of each attention as it runs, by the eager function of the model's file.

    ``run`` runs a pair of encoders, the one of texts first.
    ``of_batches``: those of every window ``[W, H, T, T]``.
    """
    weights: list[torch.Tensor] = []
    modules: list[torch.nn.Module] = []

    def recording(eager: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(module: torch.nn.Module, *tensors: Any, **options: Any) -> Any:
            output, found = eager(module, *tensors, **options)
            own = found if of_batches else found[0]
            # A second call with the same weights is for other values.
            if not (modules and modules[-1] is module and torch.equal(weights[-1], own)):
                modules.append(module)
                weights.append(own)
            return output, found

        return recorded

    with ExitStack() as stack, torch.no_grad():
        for file in {type(one.module).__module__ for one in attention_modules(model)}:
            own = f"{file}.eager_attention_forward"
            stack.enter_context(patch(own, recording(sys.modules[file].eager_attention_forward)))
        (run or model)(**arguments)
    return weights


def _gradients(found: Found, model: PreTrainedModel, loaded: LoadedModel) -> None:
    if loaded.head.predicts is None or isinstance(loaded.reader, SoundInputs):
        return
    reply = ModelGradients(loaded, ModelGradientsRequest(tokens=IDS, of={"token": 7}, wrt=["embeddings"])).reply()
    reads: Any = model.get_encoder() if loaded.reader.pairs else model
    table: Any = getattr(reads, "get_input_embeddings", model.get_input_embeddings)()
    held: list[torch.Tensor] = []

    def hold(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        if held:
            return None
        held.append(output.detach().requires_grad_())
        return held[0].clone()  # some models scale it in place

    hook = table.register_forward_hook(hold)
    outputs = model(**arguments_of(loaded))
    hook.remove()
    value = outputs.logits[0, -1].float().log_softmax(-1)[7]
    (expected,) = torch.autograd.grad(value, held)
    with torch.no_grad():  # some models keep the state of their last text
        model(**arguments_of(loaded))
    own = expected[:, 0] if loaded.entering.time_first else expected[0]
    found.gradients = error(reply.embeddings, own[: len(IDS)])  # Longformer pads its texts


def _invariants(found: Found, model: PreTrainedModel, loaded: LoadedModel) -> None:
    """Weights times values are the context, rows sum to one less the sink, edits of nothing change nothing, and a text
    of a padded batch gives the numbers that it gives alone.
    """
    taps = ["weights", "v", "context", "masked_scores"]
    if found.way == "observed":
        taps = [tap for tap in taps if all(tap in (place.taps or ()) for place in loaded.places.values())]
    layers, errors = _attentions(loaded), list[float]()
    if layers:
        plain = forward_reply(loaded, ModelForwardRequest(**input_of(loaded), layers=layers, return_=taps))
    for layer, place in zip(plain.layers if layers else (), loaded.places.values(), strict=True):
        weights = np.asarray(layer.weights)
        if "context" in taps:
            values = np.asarray(layer.v)
            repeats = weights.shape[-3] // values.shape[-3]
            errors.append(error(weights @ values.repeat(repeats, -3), layer.context))
        scores = np.asarray(layer.masked_scores) if "masked_scores" in taps else weights
        errors.append(error(weights.sum(-1), _row_sums(scores, place)))
    nothing = [Edit(tap="weights", scale=1.0), Edit(tap="output", scale=1.0)]
    edits = {
        key: [edit for edit in nothing if place.taps is None or edit.tap in place.taps]
        for key, place in (loaded.places or loaded.implicit).items()
    }
    if isinstance(loaded.reader, EncoderInputs | SoundInputs | PairInputs):
        edited = forward_reply(
            loaded, ModelForwardRequest(**input_of(loaded), layers=layers, return_=taps, edits=edits)
        )
        pairs = zip(edited.layers, plain.layers, strict=True)
        found.invariants = max(*errors, *(error(layer.weights, own.weights) for layer, own in pairs))
        return
    errors.append(error(_states(loaded, IDS, edits=edits), _states(loaded, IDS)))
    if loaded.reader.mixes_padding(len(IDS)):
        found.reasons["batch"] = "padding changes its numbers: a batch of texts of unequal lengths is refused"
    else:
        texts = [IDS, IDS[:4]]
        errors += map(error, _states(loaded, texts), [_states(loaded, text) for text in texts])
    found.invariants = max(errors)


def _row_sums(scores: np.ndarray, place: AttentionPlace) -> np.ndarray:
    """Return the sums ``[H, Lq]`` that rows of weights have by the definition of the softmax."""
    if not getattr(place.spec.normalizer, "sinks", False):
        return np.ones(scores.shape[:-1])
    (sink,) = (value for name, value in place.module.named_parameters() if "sink" in name)
    keys = np.exp(scores.astype(np.float64)).sum(-1)
    return keys / (keys + np.exp(sink.detach().cpu().numpy().reshape(-1, 1).astype(np.float64)))


def _states(loaded: LoadedModel, tokens: Any, *, edits: Any = None) -> Any:
    """Return the logits of the real tokens, or the last hidden states, of one text or of each."""
    request = ModelForwardRequest(tokens=tokens, edits=edits or {})
    checked = check_request(loaded, request, lambda _: True)
    every = loaded.places | loaded.implicit
    questions = {place.key: LayerTask(edits=request.edits.get(key, ())) for key, place in every.items()}
    with torch.no_grad():
        asking = AttentionPass(questions)
        with LayerStates(every.values(), asking).reading((), output=False, hidden=False):
            output = loaded.run(checked.inputs.arguments, asking)
    rows = output[_result_of(output)]
    mask = None if rows.ndim < 3 else checked.inputs.predicted.mask  # one vector of a text has no padding
    found = [row if mask is None else row[mask[number].to(row.device)] for number, row in enumerate(rows)]
    return found if isinstance(tokens[0], list) else found[0]


def _generated(found: Found, model: PreTrainedModel, loaded: LoadedModel) -> None:
    if not model.can_generate() or isinstance(loaded.reader, SoundInputs):
        return
    model.generation_config = GenerationConfig(
        **{name: getattr(model.generation_config, name) for name in ("decoder_start_token_id",)},
        pad_token_id=0, eos_token_id=2, bos_token_id=1,
    )  # fmt: skip
    loaded.model.generation_config = copy.deepcopy(model.generation_config)
    fresh = built(found.kind).to(model.device)
    fresh.generation_config = copy.deepcopy(model.generation_config)
    # One that has run attends otherwise in bigbird_pegasus, and keeps the state of its last text in recurrent_gemma.
    try:
        tokens = _tokens if loaded.places else _tokens_alone
        tokens(loaded, SAMPLED)
    except InvalidRequest as fault:
        found.reasons["generate"] = short_error(fault)
        tokens = _tokens_alone
    found.generated = all(
        tokens(loaded, options) in (_own_tokens(each, loaded, options) for each in (model, fresh))
        for options in ({"temperature": 0}, SAMPLED)
    )
    if not found.generated:
        found.reasons["generate"] = "other tokens"


def _joined(found: Found, _: PreTrainedModel, loaded: LoadedModel) -> None:
    if found.generated is None:
        return
    shared = joined(loaded, NEW)
    found.joined, found.apart = shared.kind, shared.differ
    if shared.reason is not None:
        found.reasons["joined"] = shared.reason
    if not shared.tokens:
        found.reasons["joined"] = "other tokens"


def _tokens(loaded: LoadedModel, options: dict[str, Any]) -> list[list[int]]:
    fields = {"model": loaded.name, "prompt": PROMPTS, "max_tokens": NEW, "attention": {"top_k": 1}, **options}
    request = validate(CompletionRequest, fields)
    (ended,) = generate(loaded, request, plan_generation(loaded, request), lambda _: None).last
    choices = validate(Completion, orjson.loads(to_json(ended))).choices
    return [[token.id for token in choice.attention] for choice in choices]


def _tokens_alone(loaded: LoadedModel, options: dict[str, Any]) -> list[list[int]]:
    """The same of a type that tells no weights while it generates."""
    request = validate(CompletionRequest, {"model": loaded.name, "prompt": PROMPTS, "max_tokens": NEW, **options})
    plan = plan_generation(loaded, request)
    decoder = Decoder(loaded)
    generation = Generation(decoder, request, plan, lambda _: None)
    texts: dict[int, RunningText] = {}
    while not generation.has_ended:
        for fault in (read_prompts(decoder, [generation], 100) or decode(decoder, [generation])).values():
            raise fault
        texts |= {text.choice: text for text in generation.texts}
    return [text.ids[len(PROMPTS[choice]) :] for choice, text in sorted(texts.items())]


def _own_tokens(model: PreTrainedModel, loaded: LoadedModel, options: dict[str, Any]) -> list[list[int]]:
    """The tokens that transformers generates for each prompt alone; choice i is drawn after the seed + i."""
    drawn = options["temperature"] > 0
    sampling = {name: options[name] for name in ("temperature", "top_p") if drawn} | ({"top_k": 0} if drawn else {})
    found = []
    for choice, prompt in enumerate(PROMPTS):
        given = torch.tensor([prompt], device=model.device)
        torch.manual_seed(options.get("seed", 0) + choice)
        with torch.no_grad():
            tokens: Any = copy.deepcopy(model).generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=NEW, num_beams=1, do_sample=drawn,
                **sampling,
            )  # fmt: skip
        row = tokens[0, 1 if loaded.reader.pairs else len(prompt) :].tolist()
        found.append(row[: row.index(2) + 1] if 2 in row else row)
    return found


def _imported(found: Found, model: PreTrainedModel, loaded: LoadedModel) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder, "net"))
        stacks: tuple[Any, ...] = ("encoder", "decoder") if loaded.reader.pairs else (None,)
        layer = next((int(key) for key in loaded.places if key.isdigit()), 0)  # that attends, of a hybrid
        requests = [ImportModule(checkpoint="net", stack=stack, layer=layer) for stack in stacks]
        families = {plan(Path(folder), request).source.family for request in requests}
        found.family = " ".join(sorted(families))


_PARTS: Final[dict[str, Callable[[Found, PreTrainedModel, LoadedModel], None]]] = {
    "whole": _whole, "weights": _weights, "gradients": _gradients, "invariants": _invariants, "generate": _generated,
    "joined": _joined, "import": _imported, "implicit": _implicit,
}  # fmt: skip
