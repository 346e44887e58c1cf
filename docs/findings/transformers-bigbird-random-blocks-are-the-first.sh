#!/bin/sh
# transformers' BigBird has no random blocks outside training: it counts the first block once more for each of them.
#
# Versions: transformers 5.23.0, torch 2.13.0, numpy 2.4.6; Python 3.11 on x86-64.
# Guess, written first: Under eval() a query of block-sparse BigBird looks at the first and the last block, three
#   around it and num_random_blocks others, the same ones at each call. The rows of the returned attentions sum to 1,
#   and they mix the values to the layer's output.
# Behaviour: Under eval() each random block is block 0, the first, which is a global block already: its keys stand 1
#   + num_random_blocks times in the softmax. With equal scores and 3 random blocks, a query in the middle gives half
#   of its weight to the first block. The returned attentions hold one of the copies: their rows sum to 5/8, and they
#   do not mix the values to the output. Under train() the blocks are random, and all is as guessed.
# Output:
#   train rows of the middle sum to {1.0}
#     weights mix the values to the output: True
#   eval  rows of the middle sum to {0.625}
#     weights mix the values to the output: False
#   eval, first block times 4: rows sum to {1.0}
#     weights mix the values to the output: True
#     share of the first block: 0.5
# Exits 0 if it is so, 1 if it has changed, 2 if the packages cannot be installed.
set -u
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0 numpy==2.4.6 || exit 2
cd "$folder" && cat > found.py <<'CODE'
import torch
from transformers import BigBirdConfig, BigBirdModel

BLOCK, BLOCKS, RANDOM = 4, 16, 3
LENGTH = BLOCK * BLOCKS
MIDDLE = range(4 * BLOCK, (BLOCKS - 4) * BLOCK)  # queries whose window touches no global block
kept = {}


def show(*found):
    """Print what was found on one line."""
    print(*found)


def keep(module, inputs, output):
    """Keep the values and the output of the layer's attention."""
    kept.update(values=module.value(inputs[0]), output=output[0])


torch.manual_seed(0)
model = BigBirdModel(
    BigBirdConfig(
        hidden_size=16, num_attention_heads=1, num_hidden_layers=1, intermediate_size=16, vocab_size=100, block_size=BLOCK,
        num_random_blocks=RANDOM, attention_type="block_sparse", max_position_embeddings=LENGTH, hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
)
attention = model.encoder.layer[0].attention.self
attention.query.weight.data.zero_()  # every score is zero
attention.query.bias.data.zero_()
attention.register_forward_hook(keep)
tokens = torch.randint(0, 100, (1, LENGTH))
for training in (True, False):
    model.train(training)
    with torch.no_grad():
        weights = model(tokens, output_attentions=True).attentions[0][0, 0]
    mixed = (weights @ kept["values"][0] - kept["output"][0])[MIDDLE].abs().max() < 1e-5
    sums = {round(each, 3) for each in weights[MIDDLE].sum(-1).tolist()}
    show("train" if training else "eval ", "rows of the middle sum to", sums)
    show("  weights mix the values to the output:", bool(mixed))
weights[:, :BLOCK] *= 1 + RANDOM
mixed = (weights @ kept["values"][0] - kept["output"][0])[MIDDLE].abs().max() < 1e-5
show("eval, first block times 4: rows sum to", {round(each, 3) for each in weights[MIDDLE].sum(-1).tolist()})
show("  weights mix the values to the output:", bool(mixed))
show("  share of the first block:", round(weights[MIDDLE, :BLOCK].sum(-1).mean().item(), 3))
CODE
cat > expected.txt <<'OUTPUT'
train rows of the middle sum to {1.0}
  weights mix the values to the output: True
eval  rows of the middle sum to {0.625}
  weights mix the values to the output: False
eval, first block times 4: rows sum to {1.0}
  weights mix the values to the output: True
  share of the first block: 0.5
OUTPUT
venv/bin/python found.py > found.txt && diff expected.txt found.txt || exit 1
