#!/bin/sh
# transformers 5 takes head_mask and ignores it: the heads stay on, without an error or a warning.
#
# Versions: transformers 5.23.0, torch 2.13.0, numpy 2.4.6; Python 3.11 on x86-64.
# Guess, written first: model(..., head_mask=mask) of BERT, GPT-2 and ViT switches heads off, as it did since 2019
#   and does in the code of papers about heads; or, if the argument is gone, it raises TypeError.
# Behaviour: The argument is gone, and the models take any keyword (**kwargs), so that the mask is passed on and
#   nothing reads it. An ablation that runs over all heads finds that none matters. A misspelled attention_mask is
#   ignored in the same way. Only generate() refuses words that it does not know.
# Output:
#   BertModel: head_mask of zeros changes the output: False, attention_maks: False,
#     heads that are off: True; warnings: 0
#   GPT2LMHeadModel: head_mask of zeros changes the output: False, attention_maks: False,
#     heads that are off: True; warnings: 0
#   ViTModel: head_mask of zeros changes the output: False, attention_maks: False,
#     heads that are off: True; warnings: 0
#   generate: ValueError The following `model_kwargs` are not used by the model: ['head_mask']
# Exits 0 if it is so, 1 if it has changed, 2 if the packages cannot be installed.
set -u
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0 numpy==2.4.6 || exit 2
cd "$folder" && cat > found.py <<'CODE'
import warnings

import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, ViTConfig, ViTModel

HEADS, LAYERS, WIDTH = 4, 2, 32
TEXT = {"input_ids": torch.arange(8)[None]}
IMAGE = {"pixel_values": torch.ones(1, 3, 16, 16)}
SIZES = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "intermediate_size": 48}
CASES = [
    (BertModel(BertConfig(**SIZES, vocab_size=50)), TEXT, "attention.output.dense"),
    (GPT2LMHeadModel(GPT2Config(**SIZES, vocab_size=50, bos_token_id=0, eos_token_id=0)), TEXT, "attn.c_proj"),
    (ViTModel(ViTConfig(**SIZES, image_size=16, patch_size=8)), IMAGE, "attention.o_proj"),
]


def show(*found):
    """Print what was found on one line."""
    print(*found)


def nothing(module, inputs):
    """Give the projection behind the heads zeros: the heads are off."""
    return (torch.zeros_like(inputs[0]),)


off = torch.zeros(LAYERS, HEADS)
for model, inputs, projection in CASES:
    model.eval().set_attn_implementation("eager")
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain = model(**inputs)[0]
        masked = model(**inputs, head_mask=off)[0]
        unknown = model(**inputs, attention_maks=torch.zeros(1, 8))[0]
        for name, module in model.named_modules():
            if name.endswith(projection):
                module.register_forward_pre_hook(nothing)
        without = model(**inputs)[0]
    changed = [not torch.equal(plain, other) for other in (masked, unknown, without)]
    show(f"{type(model).__name__}: head_mask of zeros changes the output: {changed[0]}, attention_maks: {changed[1]},")
    show(f"  heads that are off: {changed[2]}; warnings: {len(caught)}")
try:
    CASES[1][0].generate(**TEXT, head_mask=off, max_new_tokens=1)
except ValueError as error:
    show("generate:", type(error).__name__, str(error).split(" (")[0])
CODE
cat > expected.txt <<'OUTPUT'
BertModel: head_mask of zeros changes the output: False, attention_maks: False,
  heads that are off: True; warnings: 0
GPT2LMHeadModel: head_mask of zeros changes the output: False, attention_maks: False,
  heads that are off: True; warnings: 0
ViTModel: head_mask of zeros changes the output: False, attention_maks: False,
  heads that are off: True; warnings: 0
generate: ValueError The following `model_kwargs` are not used by the model: ['head_mask']
OUTPUT
venv/bin/python found.py > found.txt && diff expected.txt found.txt || exit 1
