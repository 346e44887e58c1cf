"""Folders as sentence-transformers writes them: version 3 (``old``), and version 6 (``new``)."""

import json

import torch
from safetensors.torch import save_file
from tests.client.tiny_models import tokenizer
from tests.models.small_models import eager
from tokenizers.processors import TemplateProcessing

GENERATIONS = ("old", "new")
FLAGS = {
    "cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean": "weightedmean_tokens", "lasttoken": "lasttoken",
}  # fmt: skip
TYPES = {
    "old": {name: f"sentence_transformers.models.{name}" for name in ("Transformer", "Pooling", "Dense", "Normalize")},
    "new": {
        "Transformer": "sentence_transformers.base.modules.transformer.Transformer",
        "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
        "Dense": "sentence_transformers.base.modules.dense.Dense",
        "Normalize": "sentence_transformers.base.modules.normalize.Normalize",
    },
}


def marked():
    """Return the tokenizer of tests, with a special token before and one behind each text."""
    found = tokenizer()
    found.backend_tokenizer.post_processor = TemplateProcessing(
        single="[BOS] $A [UNK]", special_tokens=[("[BOS]", 2), ("[UNK]", 1)]
    )
    return found


def dense_tensors(config):
    """Return the tensors of a dense layer, the same in every run."""
    drawn, shape = torch.Generator().manual_seed(1), (config["out_features"], config["in_features"])
    found = {"linear.weight": torch.randn(shape, generator=drawn) / 4}
    if config["bias"]:
        found["linear.bias"] = torch.randn(shape[:1], generator=drawn)
    if config.get("use_residual") and shape[0] != shape[1]:
        found["residual.weight"] = torch.randn(shape, generator=drawn) / 4
    return found


def write(
    folder, family, generation, *, modes=("mean",), normalize=False, include_prompt=True, limit=None, lowers=False,
    chat=None, prompts=None, default=None, truncate_dim=None, dense=(),
):  # fmt: skip
    """Write a model of a family. ``chat``: a chat template, which texts are written in.

    ``dense``: the config of each dense layer, whose tensors are those of ``dense_tensors``.
    """
    eager(family).save_pretrained(folder)
    words = marked()
    words.chat_template = chat
    config = {}
    if generation == "old":
        config = {"max_seq_length": limit, "do_lower_case": lowers}
        pooling = {
            "word_embedding_dimension": 16, **{f"pooling_mode_{FLAGS[mode]}": mode in modes for mode in FLAGS},
            "include_prompt": include_prompt,
        }  # fmt: skip
    else:
        words.model_max_length = limit or words.model_max_length
        way = {"method": "forward", "method_output_name": "last_hidden_state"}
        ways = {"text": way} | ({"message": way | {"format": "flat"}} if chat else {})
        config = {"transformer_task": "feature-extraction", "modality_config": ways}
        config |= {"module_output_name": "token_embeddings"} | ({"do_lower_case": True} if lowers else {})
        mode = modes[0] if len(modes) == 1 else [*modes]
        pooling = {"embedding_dimension": 16, "pooling_mode": mode, "include_prompt": include_prompt}
    words.save_pretrained(folder)
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense), *(["Normalize"] if normalize else [])]
    paths = ["", *(f"{at}_{kind}" for at, kind in enumerate(kinds) if at)]
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": TYPES[generation][kind]}
        for at, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    whole = {"default_prompt_name": default, "prompts": prompts or {}, "similarity_fn_name": "cosine"}
    whole |= {} if truncate_dim is None else {"truncate_dim": truncate_dim}
    whole |= {"model_type": "SentenceTransformer"} if generation == "new" else {}
    files = {
        "modules.json": modules, "config_sentence_transformers.json": whole, "sentence_bert_config.json": config,
        "1_Pooling/config.json": pooling,
    }  # fmt: skip
    for path in paths[1:]:
        (folder / path).mkdir()
    for at, layer in enumerate(dense):
        files[f"{paths[2 + at]}/config.json"] = layer
        save_file(dense_tensors(layer), folder / paths[2 + at] / "model.safetensors")
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
