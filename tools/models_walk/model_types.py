"""Model types of transformers, each built small, with what reads its images or sounds."""

import copy
from functools import cache
from typing import Any, Final

import torch
import transformers
from tests.models.inputs.sounds import small_sounds as sounds
from transformers import (
    CONFIG_MAPPING,
    PreTrainedModel,
    Siglip2ImageProcessorPil,
    ViTImageProcessorPil,
    WhisperFeatureExtractor,
)
from transformers.models.auto import modeling_auto
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.utils import logging

from attention_service.models.folders.head_kinds import head_kind
from attention_service.models.folders.input_kinds import PAIRS
from attention_service.models.inputs.images.prompt_inputs import image_tokens
from attention_service.models.inputs.model_limits import SOUND
from attention_service.models.loaded.model_loading import VISION_HALVES as _VISION
from tools.models_walk.small_configs import small_config

READ: Final = frozenset({"input_ids", "pixel_values", *SOUND})
"""The inputs of the models that are compared."""
MOST: Final = 100_000_000
"""The most parameters of a model that is built."""
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


def named() -> list[str]:
    """Return every model type of a class that may be compared, without importing any; those that predict come first."""
    return [*dict.fromkeys(kind for mapping in _HEADS for kind in getattr(modeling_auto, mapping))]


def kinds() -> list[str]:
    """Return every model type that predicts tokens or reads tokens, pixels or sounds; those that predict come first."""
    predict = {kind for mapping in _HEADS[:-1] for kind in getattr(modeling_auto, mapping)}
    return [kind for kind in named() if kind in predict or reads(kind) in READ]


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
