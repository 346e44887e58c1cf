#!/bin/sh
# performer-pytorch's mask hides the values of padding and keeps its keys in the denominator: a padded text's output shrinks.
#
# Versions: performer-pytorch 1.1.4, torch 2.13.0, einops 0.8.2; Python 3.11 on x86-64.
# Guess, written first: SelfAttention(mask=...) gives the tokens of a padded text what they get without the padding,
#   as the mask of linear-attention-transformer does.
# Behaviour: The values of padded tokens are set to zero; their keys still count in the sum that divides. A text of 50
#   tokens padded to 200 gives a quarter of its output.
# Output:
#   50 tokens of value 1, padded to 50: 1.000
#   50 tokens of value 1, padded to 100: 0.500
#   50 tokens of value 1, padded to 200: 0.250
# Exits 0 if it is so, 1 if it has changed, 2 if the packages cannot be installed.
set -u
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install --quiet performer-pytorch==1.1.4 local-attention==1.11.2 torch==2.13.0 einops==0.8.2 numpy==2.4.6 || exit 2
cd "$folder" && cat > found.py <<'CODE'
import torch
from performer_pytorch import SelfAttention


def show(*found):
    """Print what was found on one line."""
    print(*found)


attention = SelfAttention(dim=8, heads=1, dim_head=8, causal=False, nb_features=16).eval()
with torch.no_grad():  # scores of zero, values as they are: every output is the mean of the values that are looked at
    attention.to_q.weight.zero_()
    attention.to_k.weight.zero_()
    attention.to_v.weight.copy_(torch.eye(8))
    attention.to_out.weight.copy_(torch.eye(8))
    attention.to_out.bias.zero_()
    for length in (50, 100, 200):
        mask = torch.arange(length)[None] < 50
        output = attention(torch.ones(1, length, 8), mask=mask)[0, 0, 0].item()
        show(f"50 tokens of value 1, padded to {length}: {output:.3f}")
CODE
cat > expected.txt <<'OUTPUT'
50 tokens of value 1, padded to 50: 1.000
50 tokens of value 1, padded to 100: 0.500
50 tokens of value 1, padded to 200: 0.250
OUTPUT
venv/bin/python found.py > found.txt && diff expected.txt found.txt || exit 1
