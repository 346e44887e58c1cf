#!/bin/sh
# A layer of attention over 1,024 tokens has 151 million multiplications, and 0, 0.02, 17 or 294 million by counter.
#
# Versions: thop 0.1.1.post2209072238, torchinfo 1.8.0, ptflops 0.7.5, torch 2.13.0, numpy 2.4.6; Python 3.11 on
#   x86-64.
# Guess, written first: Counters of multiplications agree on one layer, written by hand or as nn.MultiheadAttention,
#   within the factor of 2 between multiplications and operations.
# Behaviour: thop counts modules, and so not the two products of matrices of a layer that is written by hand, which
#   are 89 % here and grow with the square of the length; ptflops counts them if they are written torch.matmul, and
#   not if they are written @. thop and torchinfo count nothing of nn.MultiheadAttention, and ptflops counts its
#   products twice if it returns its weights. torchinfo counts a linear layer once for a text, not for each token.
#   The backend 'aten' of ptflops is right.
# Output:
#   millions           150.99
#                           @     matmul  Multihead
#   thop                16.78      16.78       0.00
#   torchinfo            0.02       0.02       0.00
#   ptflops             16.78     150.99     293.73
#   ptflops, aten      150.99     150.99     150.99
# Exits 0 if it is so, 1 if it has changed, 2 if the packages cannot be installed.
set -u
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install --quiet thop==0.1.1.post2209072238 torchinfo==1.8.0 ptflops==0.7.5 torch==2.13.0 numpy==2.4.6 || exit 2
cd "$folder" && cat > found.py <<'CODE'
import copy
import warnings

import ptflops
import thop
import torch
import torchinfo

TOKENS, WIDTH, HEADS = 1024, 64, 4
TRUE = TOKENS * WIDTH * 4 * WIDTH + 2 * TOKENS * TOKENS * WIDTH  # q, k, v and output; scores and mixed values
text = torch.randn(1, TOKENS, WIDTH)


class ByHand(torch.nn.Module):
    """Self-attention as most models write it, by a function for products of matrices."""

    def __init__(self, product):
        super().__init__()
        self.product = product
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        query, key, value = (each.view(1, TOKENS, HEADS, -1).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        weights = (self.product(query, key.transpose(-1, -2)) / query.shape[-1] ** 0.5).softmax(-1)
        return self.out(self.product(weights, value).transpose(1, 2).reshape(x.shape))


class Multihead(torch.nn.Module):
    """PyTorch's own, with its weights."""

    def __init__(self):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


def by_ptflops(model, **options):
    """Return the count of ptflops."""
    options |= {"as_strings": False, "print_per_layer_stat": False, "verbose": False}
    return ptflops.get_model_complexity_info(model, (TOKENS, WIDTH), **options)[0]


COUNTERS = {
    "thop": lambda model: thop.profile(model, inputs=(text,), verbose=False)[0],
    "torchinfo": lambda model: torchinfo.summary(model, input_data=text, verbose=0).total_mult_adds,
    "ptflops": by_ptflops,
    "ptflops, aten": lambda model: by_ptflops(model, backend="aten"),
}


def show(*found):
    """Print what was found on one line."""
    print(*found)


warnings.simplefilter("ignore")
show(f"{'millions':14} {TRUE / 1e6:10.2f}")
show(f"{'':14} {'@':>10} {'matmul':>10} {'Multihead':>10}")
layers = [ByHand(lambda a, b: a @ b), ByHand(lambda a, b: torch.matmul(a, b)), Multihead()]
for name, count in COUNTERS.items():
    show(f"{name:14}", *(f"{count(copy.deepcopy(layer.eval())) / 1e6:10.2f}" for layer in layers))
CODE
cat > expected.txt <<'OUTPUT'
millions           150.99
                        @     matmul  Multihead
thop                16.78      16.78       0.00
torchinfo            0.02       0.02       0.00
ptflops             16.78     150.99     293.73
ptflops, aten      150.99     150.99     150.99
OUTPUT
venv/bin/python found.py > found.txt && diff expected.txt found.txt || exit 1
