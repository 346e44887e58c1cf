"""Generator of ``docs/checkpoints.md``: ``python -m tests.docs.checkpoints_page`` writes it from registry and tests."""

from attention_service.modules.checkpoints.families import FAMILIES, INEXACT
from attention_service.modules.checkpoints.family import Family
from tests.docs.snippets import ROOT
from tests.modules.checkpoints.refused import REFUSED, Refused
from tests.modules.checkpoints.test_families import GRADIENTS, OUTPUT, TINY, WEIGHTS

PAGE = ROOT / "docs" / "checkpoints.md"
HEAD = f"""# Checkpoints

A checkpoint is a folder in the model repository (`ATTENTION_MODELS_DIR`) with a `config.json` and safetensors files,
sharded or not; or a single safetensors file. [What you can open](open.md) lists the forms of whole models,
such as GGUF files and those of timm and OpenCLIP. Pickled files are refused, because reading them can run code;
[convert](#convert) them. The checkpoint `tiny` ships with the server.

```console
attention checkpoints                      # the checkpoints in the model repository
attention checkpoints gpt2                 # each attention layer: heads, widths, spec
attention import gpt2 --layer 3            # one layer, as the module gpt2.3
attention import tiny --all                # every layer, or none
attention import base --adapter sql-lora   # with an adapter of the checkpoint merged into the layer
attention import openai-community/gpt2     # downloaded from the Hugging Face hub (extra hub), then imported
```

The server downloads from the hub only if its operator allows it (`ATTENTION_HUB=true`). Otherwise the command
downloads into the model repository of the machine on which it runs. It downloads only tensors, configs, templates and
tokenizers, no code and no pickled file. A bar shows the progress. A download stops at the size that the hub lists. The
folder appears when all files have arrived with the hashes that the hub states, and when every file that an index names
is a safetensors file. `attention models fetch` downloads a checkpoint and [loads the whole model](models.md).

## What an import computes

`model_type` in `config.json` chooses the family, and the family makes the spec from the other entries. A missing entry
has the default of its class in transformers. The fields of `spec` in the request replace those of the checkpoint:
`--spec '{{"softcap": 30}}'` adds a softcap, and `--spec '{{"masks": []}}'` removes the causal mask. Entries that
transformers reads for every class count too: `"is_causal": false` removes the causal mask of a decoder, and lets a
sliding window see as many keys after the query as before it.

If a field that changes the numbers is missing, the import is refused with 422, and `param` names the field:
`num_heads`, `spec.masks` or `spec.add_zero_attn`. A state dict of `torch.nn.MultiheadAttention` has none of these
fields. A layer of `torch.nn.Transformer` lacks only the number of heads and the masks of self-attention. A checkpoint
of BERT without `config.json` lacks its masks.

The input of the module is the input of the attention block, after the norm. Its output is the output of the block,
before the residual sum. Dropout is not part of the spec; a request can add it. Fused and transposed tensors are split
into `q_proj`, `k_proj` and `v_proj`. The server reads the tensors of a layer, and
maps no file: one that is replaced meanwhile ends nothing.

## Families

Tests build a tiny model of each family with random weights, save it, import its blocks, and compare them in float32
with the eager attention of transformers. Differences are at most {OUTPUT:.0e} of the output and {WEIGHTS:.0e} of the
weights; gradients of all parameters differ by at most {GRADIENTS:.0e} of the largest. The column "decode" marks
families whose sequence was also computed in three parts with a past. Every `model_type` in the table has such a
tiny model.

"""
TAIL = """
A checkpoint of another `model_type` is refused. For ALBERT, `layer` counts groups of layers, which share one block. For
Longformer, each request sends the global tokens as `global_mask`. The `model_type` of a part of `config.json`
(`text_config`, `vision_config`, `encoder`, `decoder`) chooses the family of that stack. A part without `model_type`
gets it from the whole config, as `clip_text_model` for the text of `clip`.

Some families cannot be computed exactly, and the error says why:

{INEXACT}

`config.json` states whether the class in transformers has biases (`attention_bias`, `qkv_bias`, `use_bias` and so on).
The import ignores a bias that the config excludes, and `source.ignored` of the module names it. It refuses a checkpoint
without a bias that the config requires. Weights in a [quantized form](open.md#quantized-models) that the
server reads are unpacked to float32, and `source.quantized` of the module names the form. Another `quantization_config`
is refused, because transformers then computes other numbers, unless `modules_to_not_convert` includes the attention.

## Convert

This function reads other forms of a model by transformers, and writes a folder of safetensors files without
quantization. It keeps the head of a language model, which `AutoModel` drops. Run it where you trust the files, and copy
the tokenizer's files too.

```python
from typing import Any

import transformers


def convert(source: str, target: str, **options: Any) -> None:
    config = transformers.AutoConfig.from_pretrained(source, **options)
    kind = getattr(transformers, (config.architectures or ["AutoModelForCausalLM"])[0])
    read = kind.from_pretrained(source, **options)
    vars(read.config).pop("quantization_config", None)  # it stays behind after a GGUF file
    plain = type(read)(read.config).to(read.dtype)  # read.save_pretrained would write FP8 tensors again
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(target)
```

| form | call |
|---|---|
| pickled files (`pytorch_model.bin`) | `convert(source, target)` |
| GGUF (the package `gguf`) | `convert(source, target, gguf_file="model.gguf")` |
| FP8 in blocks (`"quant_method": "fp8"`) | none is needed; `convert(source, target)` works on a machine without a GPU |
| other [quantized forms](open.md#quantized-models) | none is needed for those that are read |
| those that are [refused](open.md#quantized-models) | none: take the checkpoint before quantization |

This function reads no RoPE scaling from a GGUF file, as transformers 5.23 does not, and takes its classes' defaults
for what a file leaves to its reader, such as the scale of Gemma 2 27B: correct the new `config.json`. The server
[does both](open.md#gguf) for a whole model. Do not remove
`quantization_config` from a folder by hand: its tensors would be read without their scales.

## Refused

Some checkpoints of the families above compute something that a spec does not state. The import is refused, and the
error names the entry.

"""
CHECKED = "✓"
"""The mark of a comparison that a test makes."""


def render() -> str:
    """Return the page."""
    columns = ("family", "model_type", "blocks", "import", "output", "weights", "gradients", "decode")
    families = "".join(_family(family) for _, family in sorted(FAMILIES.items()))
    inexact = "\n".join(f"- {reason}." for reason in dict.fromkeys(INEXACT.values()))
    tail = TAIL.replace("{INEXACT}", inexact)
    refused = "".join(_refused(case) for case in REFUSED)
    return f"{HEAD}{_header(*columns)}{families}{tail}{_header('family', 'entry', 'value', 'reason')}{refused}"


def _header(*columns: str) -> str:
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"


def _family(family: Family) -> str:
    kinds = ", ".join(f"`{kind}`" for kind in sorted(family.model_types)) or "by tensor names"
    tiny = [one for one in TINY if one.family == family.name]
    blocks = sorted({f"{names.stack or ''} {names.part or 'any'}".strip() for names in family.blocks})
    compared = CHECKED if tiny else ""
    decoded = CHECKED if any(one.decodes for one in tiny) else ""
    cells = (family.name, kinds, ", ".join(blocks), compared, compared, compared, compared, decoded)
    return f"| {' | '.join(cells)} |\n"


def _refused(case: Refused) -> str:
    value = case.config.get(case.entry, next(iter(case.config.values())))
    value = value.get(case.entry, value) if isinstance(value, dict) else value
    shown = value[0] if isinstance(value, list) else value
    return f"| {case.family} | `{case.entry}` | `{shown}` | {case.why} |\n"


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
