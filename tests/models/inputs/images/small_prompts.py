"""Small models that read text with images, with random parameters and processors, beside their eager selves."""

import json
from functools import cache

import transformers
from tests.models.inputs.images.small_encoders import sharp
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import CONFIG_MAPPING, PreTrainedTokenizerFast

from attention_service.models.loaded.checkpoint_processors import image_only
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.runtime.device.torch_device import Device

WORDS = ("[PAD]", "[UNK]", "[BOS]", "[EOS]", "what", "is", "on", "the", "mat", "user", "assistant", ":", "a", "cat")
MARKS = {
    "image_token": "<image>", "video_token": "<video>", "boi_token": "<boi>", "eoi_token": "<eoi>",
    "fake_image_token": "<fake>", "global_image_token": "<global-img>", "end_of_utterance_token": "<end>",
    "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
    "vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>",
}  # fmt: skip
ROWS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))
EVERY = (*WORDS, *MARKS.values(), *ROWS, "\n", "\n\n")
VOCABULARY = 64
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} : {% for part in message['content'] %}"
    "{{ MARK if part['type'] == 'image' else part['text'] + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}assistant :{% endif %}"
)


def token(word):
    return EVERY.index(word)


def tokenizer():
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(EVERY)}, unk_token="[UNK]"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]", bos_token="[BOS]", eos_token="[EOS]",
        extra_special_tokens=MARKS, additional_special_tokens=[*ROWS], model_max_length=512,
    )  # fmt: skip


_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT = _SIZES | {
    "vocab_size": VOCABULARY, "max_position_embeddings": 512, "num_key_value_heads": 2, "pad_token_id": 0,
    "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
_PICTURE = _SIZES | {"image_size": 32, "patch_size": 8}
_SQUARE = {"height": 32, "width": 32}
_GRIDS = [[32, 64], [64, 32], [64, 64]]
_IMAGE = token("<image>")
_QWEN_TEXT = _TEXT | {"rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [1, 1, 2]}}
_QWEN_PIXELS = {
    "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 16 * 16, "max_pixels": 40 * 40,
}  # fmt: skip
_QWEN = {
    "image_token_id": _IMAGE,
    "video_token_id": token("<video>"),
    "vision_start_token_id": token("<|vision_start|>"),
    "vision_end_token_id": token("<|vision_end|>"),
}
_QWEN_VISION = {
    "depth": 2, "num_heads": 4, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
PROMPTS = {
    "llava": (
        {"text_config": {"model_type": "llama"} | _TEXT, "image_token_index": _IMAGE,
         "vision_config": {"model_type": "clip_vision_model", "projection_dim": 32} | _PICTURE},
        "CLIPImageProcessorPil", {"size": {"shortest_edge": 40}, "crop_size": _SQUARE},
        {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava_next": (
        {"text_config": {"model_type": "llama"} | _TEXT, "image_token_index": _IMAGE, "image_grid_pinpoints": _GRIDS,
         "vision_config": {"model_type": "clip_vision_model", "projection_dim": 32} | _PICTURE},
        "LlavaNextImageProcessorPil",
        {"size": {"shortest_edge": 32}, "crop_size": _SQUARE, "image_grid_pinpoints": _GRIDS},
        {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava_onevision": (
        {"text_config": {"model_type": "qwen2"} | _TEXT, "image_token_index": _IMAGE, "image_grid_pinpoints": _GRIDS,
         "video_token_index": token("<video>"),
         "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False} | _PICTURE},
        "LlavaOnevisionImageProcessorPil", {"size": _SQUARE, "image_grid_pinpoints": _GRIDS},
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    ),
    "qwen2_5_vl": (
        {"text_config": _QWEN_TEXT, **_QWEN,
         "vision_config": _QWEN_VISION | {"window_size": 16, "fullatt_block_indexes": [1]}},
        "Qwen2VLImageProcessorPil", _QWEN_PIXELS, {},
    ),
    "qwen3_vl": (
        {"text_config": _QWEN_TEXT | {"head_dim": 8}, **_QWEN,
         "vision_config": _QWEN_VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}},
        "Qwen2VLImageProcessorPil", _QWEN_PIXELS, {},
    ),
    "smolvlm": (
        {"text_config": {"model_type": "llama"} | _TEXT, "image_token_id": _IMAGE, "scale_factor": 2,
         "vision_config": _PICTURE},
        "SmolVLMImageProcessorPil",
        {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}, "resample": 2},
        {"image_seq_len": 4},
    ),
    "gemma3": (
        {"text_config": _TEXT | {"head_dim": 8, "sliding_window": 64}, "image_token_index": _IMAGE,
         "mm_tokens_per_image": 4, "vision_config": {"model_type": "siglip_vision_model"} | _PICTURE,
         "boi_token_index": token("<boi>"), "eoi_token_index": token("<eoi>")},
        "Gemma3ImageProcessorPil", {"size": _SQUARE, "do_pan_and_scan": False}, {"image_seq_length": 4},
    ),
    "internvl": (
        {"text_config": {"model_type": "qwen2"} | _TEXT, "image_token_id": token("<IMG_CONTEXT>"),
         "vision_config": _PICTURE | {"image_size": [32, 32], "patch_size": [8, 8]}, "downsample_ratio": 0.5},
        "GotOcr2ImageProcessorPil", {"size": _SQUARE, "crop_to_patches": True, "max_patches": 4},
        {"image_seq_length": 4},
    ),
    "paligemma": (
        {"text_config": {"model_type": "gemma"} | _TEXT | {"head_dim": 8}, "image_token_index": _IMAGE,
         "vision_config": {"model_type": "siglip_vision_model"} | _PICTURE, "projection_dim": 32},
        "SiglipImageProcessorPil", {"size": _SQUARE, "image_seq_length": 16}, {},
    ),
}  # fmt: skip
"""Config, image processor and its settings, and the processor's own settings by model type."""
CLASSES = {
    "llava": "Llava", "llava_next": "LlavaNext", "llava_onevision": "LlavaOnevision", "qwen2_5_vl": "Qwen2_5_VL",
    "qwen3_vl": "Qwen3VL", "smolvlm": "SmolVLM", "gemma3": "Gemma3", "internvl": "InternVL", "paligemma": "PaliGemma",
}  # fmt: skip


def eager(kind):
    """Return a model with the same sharp random parameters in every run."""
    auto = getattr(transformers, f"{CLASSES[kind]}ForConditionalGeneration")
    return sharp(auto, CONFIG_MAPPING[kind](**PROMPTS[kind][0]))


@cache
def processor(kind):
    _, images, settings, own = PROMPTS[kind]
    whole = image_only(getattr(transformers, f"{CLASSES[kind]}Processor"))
    parts = {"image_processor": getattr(transformers, images)(**settings), "tokenizer": tokenizer()}
    made = whole(*(parts.get(name) for name in whole.get_attributes()), **own)
    made.chat_template = TEMPLATE.replace("MARK", f"' {made.image_token} '")
    return made


def save(folder, kind):
    """Save a model that reads text with images, as a checkpoint has it."""
    made = processor(kind)
    for part in (eager(kind), made.tokenizer, made.image_processor):
        part.save_pretrained(folder)
    own = {"processor_class": type(made).__name__, **PROMPTS[kind][3]}
    (folder / "processor_config.json").write_text(json.dumps(own))
    (folder / "chat_template.jinja").write_text(made.chat_template)


@cache
def loaded(kind):
    return LoadedModel(kind, eager(kind), tokenizer(), Device.open("cpu"), processor(kind))
