#!/bin/sh
# A boolean mask of slow_attention_n (flash-attention-softmax-n) hides nothing, and is all true afterwards.
#
# Versions: flash-attention-softmax-n 0.3.2, torch 2.13.0, einops 0.8.2; Python 3.11 on x86-64.
# Guess, written first: A boolean attn_mask of the PyTorch implementation (the one for a CPU) hides where it is false,
#   as documented and as in scaled_dot_product_attention with n = 0, and the caller's mask stays as it was.
# Behaviour: The mask hides nothing: the output is that without a mask. The hidden entries of the caller's own tensor
#   are set to minus infinity, which is true as a boolean, so that whatever uses the mask next hides nothing either. A
#   float mask is added rightly.
# Output:
#   PyTorch       [0.5, 0.0, 0.5, 0.0]
#   float mask    [0.5, 0.0, 0.5, 0.0]
#   boolean mask  [0.25, 0.25, 0.25, 0.25]
#   mask after it [True, True, True, True]
#   PyTorch after [0.25, 0.25, 0.25, 0.25]
# Exits 0 if it is so, 1 if it has changed, 2 if the packages cannot be installed.
set -u
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install --quiet flash-attention-softmax-n==0.3.2 torch==2.13.0 einops==0.8.2 numpy==2.4.6 || exit 2
cd "$folder" && cat > found.py <<'CODE'
import torch
from flash_attention_softmax_n import slow_attention_n
from torch.nn.functional import scaled_dot_product_attention


def show(*found):
    """Print what was found on one line."""
    print(*found)


query, key, value = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 4, 4), torch.eye(4)[None, None]
mask = torch.tensor([[True, False, True, False]])
added = torch.zeros(1, 4).masked_fill(~mask, float("-inf"))
show("PyTorch      ", scaled_dot_product_attention(query, key, value, attn_mask=mask).flatten().tolist())
show("float mask   ", slow_attention_n(query, key, value, attn_mask=added, softmax_n_param=0.0).flatten().tolist())
show("boolean mask ", slow_attention_n(query, key, value, attn_mask=mask, softmax_n_param=0.0).flatten().tolist())
show("mask after it", mask.flatten().tolist())
show("PyTorch after", scaled_dot_product_attention(query, key, value, attn_mask=mask).flatten().tolist())
CODE
cat > expected.txt <<'OUTPUT'
PyTorch       [0.5, 0.0, 0.5, 0.0]
float mask    [0.5, 0.0, 0.5, 0.0]
boolean mask  [0.25, 0.25, 0.25, 0.25]
mask after it [True, True, True, True]
PyTorch after [0.25, 0.25, 0.25, 0.25]
OUTPUT
venv/bin/python found.py > found.txt && diff expected.txt found.txt || exit 1
