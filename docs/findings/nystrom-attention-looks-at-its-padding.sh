#!/bin/sh
# nystrom-attention without a mask attends to the zeros that it pads a text with; with a mask of ones it does not.
#
# Versions: nystrom-attention 0.0.14, torch 2.13.0, einops 0.8.2; Python 3.11 on x86-64.
# Guess, written first: A mask that is true everywhere changes nothing, whatever the length of the text.
# Behaviour: A text whose length is no multiple of num_landmarks is padded with zeros in front. Only a mask that the
#   caller gives is padded with it; without one the zeros are keys like any other, and land in the means that are the
#   landmarks. With as many landmarks as tokens (rounded up), where the method is nearly exact, five tokens of eight
#   landmarks give the mean of eight values.
# Output:
#   5 tokens of value 1: 0.625 without a mask, 1.000 with a mask of ones
#   8 tokens of value 1: 1.000 without a mask, 1.000 with a mask of ones
# Exits 0 if it is so, 1 if it has changed, 2 if the packages cannot be installed.
set -u
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install --quiet nystrom-attention==0.0.14 torch==2.13.0 einops==0.8.2 numpy==2.4.6 || exit 2
cd "$folder" && cat > found.py <<'CODE'
import torch
from nystrom_attention import NystromAttention


def show(*found):
    """Print what was found on one line."""
    print(*found)


attention = NystromAttention(dim=8, dim_head=8, heads=1, num_landmarks=8, pinv_iterations=30, residual=False).eval()
with torch.no_grad():  # scores of zero, values as they are: every output is the mean of the values that are looked at
    attention.to_qkv.weight.copy_(torch.cat([torch.zeros(16, 8), torch.eye(8)]))
    attention.to_out[0].weight.copy_(torch.eye(8))
    attention.to_out[0].bias.zero_()
    for length in (5, 8):
        values, every = torch.ones(1, length, 8), torch.ones(1, length, dtype=torch.bool)
        without, beside = attention(values)[0, 0, 0].item(), attention(values, mask=every)[0, 0, 0].item()
        show(f"{length} tokens of value 1: {without:.3f} without a mask, {beside:.3f} with a mask of ones")
CODE
cat > expected.txt <<'OUTPUT'
5 tokens of value 1: 0.625 without a mask, 1.000 with a mask of ones
8 tokens of value 1: 1.000 without a mask, 1.000 with a mask of ones
OUTPUT
venv/bin/python found.py > found.txt && diff expected.txt found.txt || exit 1
