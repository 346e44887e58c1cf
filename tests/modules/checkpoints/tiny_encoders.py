"""Tiny encoders, pairs of encoder and decoder, and layers of torch."""

from typing import Any

import torch
from tests.modules.checkpoints.banded_weights import dense_from
from tests.modules.checkpoints.tiny_models import BERT, IDS, SIZES, TOKENS, Tiny, model
from torch import nn

CAUSAL = {"masks": [{"name": "causal"}]}
X = torch.randn(2, TOKENS, 32, generator=torch.Generator().manual_seed(3))
MEMORY = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(4))
AHEAD = nn.Transformer.generate_square_subsequent_mask(TOKENS)
PIXELS = {"pixel_values": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(5))}
VISION = {
    "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 8,
    "patch_size": 4, "attn_implementation": "eager",
}  # fmt: skip
TEXT = {name: value for name, value in (SIZES | VISION).items() if name not in {"image_size", "patch_size"}}
TEXT |= {"max_position_embeddings": 16}
PAIR = SIZES | {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "decoder_start_token_id": 1,
}  # fmt: skip
WAVE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16, "conv_dim": [8, 8],
    "conv_kernel": [4, 4], "conv_stride": [2, 2], "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "attn_implementation": "eager",
}  # fmt: skip
SOUND = {"input_values": torch.randn(2, 60, generator=torch.Generator().manual_seed(6))}


def encoder(family: str, name: str, at: str, q: str, o: str, weights: str = "", **options: Any) -> Tiny:
    """The second layer of an encoder."""
    more = {
        key: options.pop(key) for key in ("inputs", "request", "ask", "label", "decodes", "dense") if key in options
    }
    more.setdefault("request", {"layer": 1})
    return Tiny(family, model(name, **options), f"{at}.{q}", f"{at}.{o}", f"{at}{weights}", **more)


def pair(family: str, name: str, inputs: dict[str, Any], **options: Any) -> list[Tiny]:
    """The second layers of encoder and decoder."""
    label = options.pop("label", "")
    return [
        Tiny(
            family, model(name, **PAIR, **options), f"{stack}.layers.1.{at}.q_proj", f"{stack}.layers.1.{at}.out_proj",
            f"{stack}.layers.1.{at}", k=f"{stack}.layers.1.{at}.k_proj" if part == "cross" else None, inputs=inputs,
            request={"layer": 1, "part": part, "stack": stack}, decodes=(stack, part) == ("decoder", "self"),
            label=f"{label}{stack}-{part}",
        )
        for stack, at, part in [
            ("encoder", "self_attn", "self"), ("decoder", "self_attn", "self"), ("decoder", "encoder_attn", "cross"),
        ]
    ]  # fmt: skip


class Alone(nn.MultiheadAttention):
    """A multi-head attention that is called with one argument."""

    def forward(self, query: torch.Tensor, **options: Any):
        return super().forward(query, query, query, **options)


def alone() -> nn.Module:
    return Alone(32, 4, batch_first=True, add_bias_kv=True, add_zero_attn=True)


def stack_of_encoders() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def stack_of_decoders() -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 16, batch_first=True), 2)


def whole() -> nn.Module:
    return nn.Transformer(32, 4, 2, 2, 16, batch_first=True)


def layer_of_torch(build: Any, label: str, at: str, inputs: dict[str, Any], **more: Any) -> Tiny:
    return Tiny("torch-transformer", build, at, at, at, inputs=inputs, label=label, **more)


DECODED = {"tgt": X, "memory": MEMORY, "tgt_mask": AHEAD}
WHOLE = {"src": MEMORY, "tgt": X, "tgt_mask": AHEAD}
LONG_IDS = (torch.arange(24).reshape(2, 12) * 5) % 23
GLOBAL = torch.zeros(2, 12, dtype=torch.long).index_fill_(1, torch.tensor([0, 7]), 1)

ENCODERS = [
    *(
        encoder(
            "bert", name, "encoder.layer.1.attention", "self.query", "output.dense", ".self", label=name, **BERT,
            inputs=IDS | {"output_attentions": True},
        )
        for name in (
            "Roberta", "Electra", "Camembert", "Ernie", "BertGeneration", "Data2VecText", "LayoutLM",
            "RobertaPreLayerNorm", "Splinter", "Tapas", "XLMRoberta", "XLMRobertaXL",
        )
    ),
    encoder(
        "distilbert", "DistilBert", "transformer.layer.1.attention", "q_lin", "out_lin", **SIZES, dim=32, n_layers=2,
        n_heads=4, hidden_dim=16, max_position_embeddings=16,
    ),
    encoder(
        "albert", "Albert", "encoder.albert_layer_groups.1.albert_layers.0.attention", "query", "dense", **BERT,
        embedding_size=16, num_hidden_groups=2,
    ),
    *(
        encoder(
            "longformer", "Longformer", f"encoder.layer.{layer}.attention", "self", "output.dense", ".self", **BERT
            | {"max_position_embeddings": 32}, attention_window=[4, 6], request={"layer": layer}, label=f"{layer}",
            inputs={"input_ids": LONG_IDS, "global_attention_mask": GLOBAL, "output_attentions": True},
            ask={"global_mask": GLOBAL.bool().numpy()}, dense=dense_from(GLOBAL),
        )
        for layer in range(2)
    ),
    *(
        encoder(
            "modernbert", "ModernBert", f"layers.{layer}.attn", "Wqkv", "Wo", **TEXT, local_attention=4,
            global_attn_every_n_layers=2, request={"layer": layer}, label=f"{layer}",
        )
        for layer in range(2)
    ),
    encoder("vit", "ViT", "layers.1.attention", "q_proj", "o_proj", **VISION, inputs=PIXELS),
    encoder(
        "vit", "ViT", "layers.1.attention", "q_proj", "o_proj", **VISION, qkv_bias=False, inputs=PIXELS,
        label="without-bias",
    ),
    encoder("clip-text", "CLIPTextModel", "encoder.layers.1.self_attn", "q_proj", "out_proj", **TEXT, decodes=True),
    encoder(
        "clip-vision", "CLIPVisionModel", "encoder.layers.1.self_attn", "q_proj", "out_proj", **VISION, inputs=PIXELS
    ),
    encoder("siglip", "SiglipTextModel", "encoder.layers.1.self_attn", "q_proj", "out_proj", **TEXT, label="text"),
    encoder(
        "siglip", "SiglipVisionModel", "encoder.layers.1.self_attn", "q_proj", "out_proj", **VISION, inputs=PIXELS,
        label="vision",
    ),
    *(
        encoder("wav2vec2", name, "encoder.layers.1.attention", "q_proj", "out_proj", **WAVE, inputs=SOUND, label=name)
        for name in ("Wav2Vec2", "Hubert")
    ),
    encoder(
        "wav2vec2", "Wav2Vec2", "encoder.layers.1.attention", "q_proj", "out_proj", **WAVE, do_stable_layer_norm=True,
        inputs=SOUND, label="stable",
    ),
    *(
        tiny
        for name in ("Bart", "MBart", "Marian", "Pegasus", "M2M100")
        for tiny in pair(
            "bart", name, IDS | {"decoder_input_ids": IDS["input_ids"][:, 2:]}, max_position_embeddings=16,
            label="" if name == "Bart" else f"{name}-",
        )
    ),
    *pair(
        "whisper", "Whisper",
        {"input_features": torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(7)),
         "decoder_input_ids": IDS["input_ids"]},
        num_mel_bins=8, max_source_positions=10, max_target_positions=16,
    ),
    Tiny(
        "torch", alone, "", "", "", inputs={"query": X},
        request={"num_heads": 4, "spec": CAUSAL | {"masks": [], "add_zero_attn": True}},
    ),
    layer_of_torch(
        stack_of_encoders, "encoder", "layers.1.self_attn", {"src": X, "mask": AHEAD}, decodes=True,
        request={"layer": 1, "num_heads": 4, "spec": CAUSAL},
    ),
    layer_of_torch(
        stack_of_decoders, "decoder", "layers.1.self_attn", DECODED, decodes=True,
        request={"layer": 1, "num_heads": 4, "spec": CAUSAL},
    ),
    layer_of_torch(
        stack_of_decoders, "cross", "layers.1.multihead_attn", DECODED, k="layers.1.multihead_attn",
        request={"layer": 1, "num_heads": 4, "part": "cross"},
    ),
    *(
        layer_of_torch(
            whole, f"whole-{stack}-{part}", f"{stack}.layers.1.{at}", WHOLE, k=f"{stack}.layers.1.{at}" if part
            == "cross" else None, request={"layer": 1, "num_heads": 4, "part": part, "stack": stack} | spec,
        )
        for stack, at, part, spec in [
            ("encoder", "self_attn", "self", {"spec": {"masks": []}}),
            ("decoder", "self_attn", "self", {"spec": CAUSAL}),
            ("decoder", "multihead_attn", "cross", {}),
        ]
    ),
]  # fmt: skip
"""Every block that is compared."""
