#!/bin/sh
# The encoders of Marian and Pegasus scale the embeddings of input_ids and not inputs_embeds; their decoders scale
#   both.
#
# Versions: transformers 5.23.0, torch 2.13.0, numpy 2.4.6; Python 3.11 on x86-64.
# Guess, written first: model(inputs_embeds=model.get_input_embeddings()(ids)) gives the numbers of
#   model(input_ids=ids), for every text model with scale_embedding, as the checkpoints of both families have it.
# Behaviour: It does for BART, M2M-100 and the decoders. The encoders of Marian and Pegasus multiply by the square
#   root of d_model only what they look up themselves. Given as inputs_embeds the same words are that much weaker
#   beside their positions: integrated gradients, and saliency that starts from inputs_embeds, explain another output
#   than the model's. Multiply before; then the numbers are equal.
# Output:
#   BART    encoder: True, with the scale applied before: False; decoder: True
#   M2M-100 encoder: True, with the scale applied before: False; decoder: True
#   Marian  encoder: False, with the scale applied before: True; decoder: True
#   Pegasus encoder: False, with the scale applied before: True; decoder: True
# Exits 0 if it is so, 1 if it has changed, 2 if the packages cannot be installed.
set -u
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0 numpy==2.4.6 || exit 2
cd "$folder" && cat > found.py <<'CODE'
import torch
from transformers import BartConfig, BartModel, M2M100Config, M2M100Model, MarianConfig, MarianModel, PegasusConfig, PegasusModel

WIDTH = 64
SIZES = {
    "vocab_size": 100, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "scale_embedding": True, "pad_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 2,
}
FAMILIES = {
    "BART": (BartConfig, BartModel), "M2M-100": (M2M100Config, M2M100Model), "Marian": (MarianConfig, MarianModel),
    "Pegasus": (PegasusConfig, PegasusModel),
}
tokens = torch.arange(3, 11)[None]


def show(*found):
    """Print what was found on one line."""
    print(*found)


def equal(first, second):
    """True if two runs of a model gave the same numbers."""
    return torch.allclose(first[0], second[0], atol=1e-5)


for family, (config, kind) in FAMILIES.items():
    torch.manual_seed(0)
    model = kind(config(**SIZES)).eval()
    encoder, decoder = model.get_encoder(), model.get_decoder()
    with torch.no_grad():
        words, later = encoder.get_input_embeddings()(tokens), decoder.get_input_embeddings()(tokens)
        of_ids = encoder(input_ids=tokens)
        same = equal(of_ids, encoder(inputs_embeds=words))
        scaled = equal(of_ids, encoder(inputs_embeds=words * WIDTH**0.5))
        end = equal(model(input_ids=tokens, decoder_input_ids=tokens), model(input_ids=tokens, decoder_inputs_embeds=later))
    show(f"{family:7}", f"encoder: {same}, with the scale applied before: {scaled}; decoder: {end}")
CODE
cat > expected.txt <<'OUTPUT'
BART    encoder: True, with the scale applied before: False; decoder: True
M2M-100 encoder: True, with the scale applied before: False; decoder: True
Marian  encoder: False, with the scale applied before: True; decoder: True
Pegasus encoder: False, with the scale applied before: True; decoder: True
OUTPUT
venv/bin/python found.py > found.txt && diff expected.txt found.txt || exit 1
