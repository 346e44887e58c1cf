#!/bin/sh
# transformers' WavLM returns the mean of its heads' weights once for each head; wav2vec 2 returns each head's own.
#
# Versions: transformers 5.23.0, torch 2.13.0, numpy 2.4.6; Python 3.11 on x86-64.
# Guess, written first: output_attentions of WavLM, [batch, heads, frames, frames], has the weights of each head, as
#   those of wav2vec 2, HuBERT and UniSpeech have, from which its file was adapted.
# Behaviour: WavLM calls PyTorch's multi_head_attention_forward, which averages weights over heads unless it is told
#   otherwise, and repeats the average for all heads. The shape is right and every row sums to one. What looks like
#   heads that all do the same, or a head that is pruned by its entropy, is one mean.
# Output:
#   wav2vec2: (1, 4, 9, 9), rows sum to 1: True, all heads alike: False
#   wavlm: (1, 4, 9, 9), rows sum to 1: True, all heads alike: True
#   the softmax of wavlm's heads: all alike: False, their mean is what it returns: True
# Exits 0 if it is so, 1 if it has changed, 2 if the packages cannot be installed.
set -u
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0 numpy==2.4.6 || exit 2
cd "$folder" && cat > found.py <<'CODE'
import warnings

import torch
from transformers import AutoModel, Wav2Vec2Config, WavLMConfig

warnings.simplefilter("ignore")
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48, "conv_dim": [16, 16],
    "conv_kernel": [10, 8], "conv_stride": [5, 8], "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}  # fmt: skip


def show(*found):
    """Print what was found on one line."""
    print(*found)


def alike(weights):
    """True if the weights of all heads are the same."""
    return bool((weights - weights[:, :1]).abs().max() < 1e-6)


softmax, kept = torch.nn.functional.softmax, []


def keeping(x, *args, **options):
    """Softmax that keeps its result."""
    kept.append(softmax(x, *args, **options))
    return kept[-1]


sound = torch.randn(1, 400, generator=torch.Generator().manual_seed(0))
for config in (Wav2Vec2Config(**SIZES), WavLMConfig(**SIZES)):
    torch.manual_seed(0)
    model = AutoModel.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.5)
        kept.clear()
        torch.nn.functional.softmax = keeping
        (weights,) = model(sound, output_attentions=True).attentions
        torch.nn.functional.softmax = softmax
    sums = bool((weights.sum(-1) - 1).abs().max() < 1e-5)
    show(f"{config.model_type}: {tuple(weights.shape)}, rows sum to 1: {sums}, all heads alike: {alike(weights)}")
own = kept[-1].view(weights.shape)
mean = bool((own.mean(1) - weights[:, 0]).abs().max() < 1e-6)
show(f"the softmax of wavlm's heads: all alike: {alike(own)}, their mean is what it returns: {mean}")
CODE
cat > expected.txt <<'OUTPUT'
wav2vec2: (1, 4, 9, 9), rows sum to 1: True, all heads alike: False
wavlm: (1, 4, 9, 9), rows sum to 1: True, all heads alike: True
the softmax of wavlm's heads: all alike: False, their mean is what it returns: True
OUTPUT
venv/bin/python found.py > found.txt && diff expected.txt found.txt || exit 1
