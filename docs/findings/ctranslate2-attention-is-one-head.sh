#!/bin/sh
# CTranslate2's return_attention is the first head of the last layer for a model that was converted from
#   transformers.
#
# Versions: ctranslate2 4.8.5, transformers 5.23.0, torch 2.13.0, numpy 2.4.6; Python 3.11 on x86-64.
# Guess, written first: TranslationResult.attention, one matrix of target words by source words ("the attention
#   vectors"), is the mean of the heads of the last decoder layer.
# Behaviour: It is head 0 alone. A converted model says how many heads of which layer make the matrix. The converter
#   of transformers models (M2M-100 and NLLB, BART, Marian, T5) leaves the default, 1 head; that of fairseq's files,
#   by its source, asks for the mean of all. Marian trains that one head on alignments; the others do not.
#   replace_unknowns copies words by it.
# Output:
#   returned: (5, 6) rows sum to 1: True
#   layer 0: equals head []
#   layer 1: equals head [0]
#   mean of the heads of last layer: off by more than 0.2: True
#   mean of the heads of all layers: off by more than 0.2: True
# Exits 0 if it is so, 1 if it has changed, 2 if the packages cannot be installed.
set -u
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install --quiet ctranslate2==4.8.5 transformers==5.23.0 torch==2.13.0 numpy==2.4.6 || exit 2
cd "$folder" && cat > found.py <<'CODE'
import ctranslate2
import torch
from ctranslate2.converters import TransformersConverter
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import M2M100Config, M2M100ForConditionalGeneration, PreTrainedTokenizerFast

WORDS = ["<s>", "<pad>", "</s>", "<unk>", *(f"w{number}" for number in range(40))]
HEADS, LAYERS = 4, 2


def show(*found):
    """Print what was found on one line."""
    print(*found)


words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words, bos_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
)
tokenizer.save_pretrained("model")
torch.manual_seed(0)
config = M2M100Config(
    vocab_size=len(WORDS), d_model=16, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_attention_heads=HEADS,
    decoder_attention_heads=HEADS, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32,
)
model = M2M100ForConditionalGeneration(config).eval().requires_grad_(False)
for parameter in model.parameters():
    if parameter.ndim > 1:
        parameter.normal_(std=0.6)
model.set_attn_implementation("eager")
model.save_pretrained("model")
TransformersConverter("model").convert("converted")

source = ["w3", "w1", "w4", "w1", "w5", "w9"]
options = {"beam_size": 1, "min_decoding_length": 5, "max_decoding_length": 5, "return_attention": True}
translated = ctranslate2.Translator("converted").translate_batch([source], **options)[0]
returned = torch.tensor(translated.attention[0])
target = [config.decoder_start_token_id, *map(WORDS.index, translated.hypotheses[0])]
ids = {"input_ids": torch.tensor([[*map(WORDS.index, source)]]), "decoder_input_ids": torch.tensor([target])}
weights = torch.stack(model(**ids, output_attentions=True).cross_attentions)[:, 0, :, : len(returned)]
show("returned:", tuple(returned.shape), "rows sum to 1:", bool((returned.sum(-1) - 1).abs().max() < 1e-5))
for layer, heads in enumerate(weights):
    show(f"layer {layer}: equals head", [head for head in range(HEADS) if (heads[head] - returned).abs().max() < 1e-5])
for name, mean in (("last layer", weights[-1].mean(0)), ("all layers", weights.mean((0, 1)))):
    show(f"mean of the heads of {name}: off by more than 0.2:", bool((mean - returned).abs().max() > 0.2))
CODE
cat > expected.txt <<'OUTPUT'
returned: (5, 6) rows sum to 1: True
layer 0: equals head []
layer 1: equals head [0]
mean of the heads of last layer: off by more than 0.2: True
mean of the heads of all layers: off by more than 0.2: True
OUTPUT
venv/bin/python found.py > found.txt && diff expected.txt found.txt || exit 1
