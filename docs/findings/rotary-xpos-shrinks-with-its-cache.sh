#!/bin/sh
# rotary-embedding-torch: with xPos the scores of a query with cached keys shrink with the text: to half at 4,096
#   tokens.
#
# Versions: rotary-embedding-torch 0.9.1, einops 0.8.2, torch 2.13.0, numpy 2.4.6; Python 3.11 on x86-64.
# Guess, written first: rotate_queries_with_cached_keys, the call for a step of generation, gives the last query the
#   scores that rotate_queries_and_keys gives it in the whole text, with use_xpos as without.
# Behaviour: Without xPos it does. The exponent of xPos is counted from half the number of positions that are given:
#   from half of the text for the keys, and from 0 for a query that comes alone. The query's exponent is too large by
#   half of the text, which makes its scores smaller: the attention becomes flatter the longer the text is. Training
#   and a step of generation with the same weights look at different keys.
# Output:
#   xPos: False   16 keys: size of the scores 1.00, weight that moved 0.00
#   xPos: False  512 keys: size of the scores 1.00, weight that moved 0.00
#   xPos: False 4096 keys: size of the scores 1.00, weight that moved 0.00
#   xPos: True    16 keys: size of the scores 0.99, weight that moved 0.00
#   xPos: True   512 keys: size of the scores 0.82, weight that moved 0.07
#   xPos: True  4096 keys: size of the scores 0.53, weight that moved 0.08
# Exits 0 if it is so, 1 if it has changed, 2 if the packages cannot be installed.
set -u
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install --quiet rotary-embedding-torch==0.9.1 einops==0.8.2 torch==2.13.0 numpy==2.4.6 || exit 2
cd "$folder" && cat > found.py <<'CODE'
import torch
from rotary_embedding_torch import RotaryEmbedding

WIDTH = 64


def show(*found):
    """Print what was found on one line."""
    print(*found)


def whole(rotary, query, key):
    """Return the scores of the last query of a text that is rotated at once."""
    if rotary.use_xpos:
        query, key = rotary.rotate_queries_and_keys(query, key)
    else:
        query, key = rotary.rotate_queries_or_keys(query), rotary.rotate_queries_or_keys(key)
    return query[:, :, -1:] @ key.transpose(-1, -2)


def step(rotary, query, key):
    """Return the scores of the last query that comes alone, with the keys of a cache."""
    query, key = rotary.rotate_queries_with_cached_keys(query[:, :, -1:], key)
    return query @ key.transpose(-1, -2)


for xpos in (False, True):
    for length in (16, 512, 4096):
        torch.manual_seed(0)
        query, key = torch.randn(2, 1, 1, length, WIDTH)
        at_once, cached = (way(RotaryEmbedding(WIDTH, use_xpos=xpos), query, key) for way in (whole, step))
        moved = ((at_once / WIDTH**0.5).softmax(-1) - (cached / WIDTH**0.5).softmax(-1)).abs().sum() / 2
        size = cached.norm() / at_once.norm()
        show(f"xPos: {xpos!s:5} {length:4} keys: size of the scores {size:.2f}, weight that moved {moved:.2f}")
CODE
cat > expected.txt <<'OUTPUT'
xPos: False   16 keys: size of the scores 1.00, weight that moved 0.00
xPos: False  512 keys: size of the scores 1.00, weight that moved 0.00
xPos: False 4096 keys: size of the scores 1.00, weight that moved 0.00
xPos: True    16 keys: size of the scores 0.99, weight that moved 0.00
xPos: True   512 keys: size of the scores 0.82, weight that moved 0.07
xPos: True  4096 keys: size of the scores 0.53, weight that moved 0.08
OUTPUT
venv/bin/python found.py > found.txt && diff expected.txt found.txt || exit 1
