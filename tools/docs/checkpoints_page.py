"""Generator of ``docs/checkpoints.md``: ``python -m tools.docs.checkpoints_page`` writes it from registry and tests."""

from tests.modules.checkpoints.refused import REFUSED, Refused
from tests.modules.checkpoints.test_families import GRADIENTS, OUTPUT, TINY, WEIGHTS

from attention_service.modules.checkpoints.families import FAMILIES, INEXACT
from attention_service.modules.checkpoints.family import Family
from tools.docs.snippets import ROOT

PAGE = ROOT / "docs" / "checkpoints.md"
HEAD = f"""# Checkpoints

A checkpoint is a folder in the model repository (`ATTENTION_MODELS_DIR`) with a `config.json` and safetensors files,
sharded or not; or a single safetensors file. Layers of a ViT, CLIP or SigLIP that timm or OpenCLIP wrote have the
names of the class of transformers that [computes it](models.md#timm-and-openclip). [What you can open](open.md) lists
the forms of whole models; layers of GGUF files are not imported. Pickled files are refused; [convert](#convert)
them. The checkpoint `tiny` ships with the server.

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
tokenizers, no code and no pickled file. The folder appears when all files have arrived with the hashes that the hub
states. `attention models fetch` downloads a checkpoint and [loads the whole model](models.md).

## What an import computes

`model_type` in `config.json` chooses the family, and the family makes the spec from the other entries. A missing entry
has the default of its class in transformers. The fields of `spec` in the request replace those of the checkpoint:
`--spec '{{"softcap": 30}}'` adds a softcap, and `--spec '{{"masks": []}}'` removes the causal mask.
`"is_causal": false` removes the causal mask of a decoder, and lets a sliding window see as many keys after
the query as before it.

If a field that changes the numbers is missing, the import is refused with 422, and `param` names the field:
`num_heads`, `spec.masks` or `spec.add_zero_attn`, as for a state dict of `torch.nn.MultiheadAttention`.

The input of the module is the input of the attention block, after the norm. Its output is the output of the block,
before the residual sum. Dropout is not part of the spec; a request can add it. Fused and transposed tensors are split
into `q_proj`, `k_proj` and `v_proj`.

## Families

Tests import the blocks of a tiny model of each `model_type` with random weights, and compare outputs, weights and
gradients in float32 with the eager attention of transformers. Differences are at most {OUTPUT:.0e} of the output and
{WEIGHTS:.0e} of the weights; gradients of all parameters differ by at most {GRADIENTS:.0e} of the largest. The column
"decode" marks families whose sequence was also computed in three parts with a past.

"""
TAIL = """
A checkpoint of another `model_type` is refused. For ALBERT, `layer` counts groups of layers, which share one block. For
Longformer, each request sends the global tokens as `global_mask`. The `model_type` of a part of `config.json`
(`text_config`, `vision_config`, `encoder`, `decoder`) chooses the family of that stack. A part without `model_type`
gets it from the whole config, as `clip_text_model` for the text of `clip`.

Some families cannot be computed exactly, and the error says why:

{INEXACT}

The import ignores a bias that the config excludes, and `source.ignored` of the module names it. An adapter beside
its base is named there too: `"adapter"` with the path of the folder merges it. It refuses a checkpoint
without a bias that the config requires. Weights in a [quantized form](open.md#quantized-models) that the
server reads are unpacked to float32, and `source.quantized` of the module names the form. Another `quantization_config`
is refused, unless `modules_to_not_convert` includes the attention.

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
| pickled files (`pytorch_model.bin`) | none is needed: [`attention convert`](open.md#convert-a-checkpoint) |
| GGUF (the package `gguf`) | `convert(source, target, gguf_file="model.gguf")` |
| FP8 in blocks (`"quant_method": "fp8"`) | none is needed; `convert(source, target)` works on a machine without a GPU |
| other [quantized forms](open.md#quantized-models) | none is needed for those that are read |
| those that are [refused](open.md#quantized-models) | none: take the checkpoint before quantization |

From a GGUF file, this function reads no RoPE scaling, and takes the defaults of transformers' classes: correct the new
`config.json`. The server [does both](open.md#gguf) for a whole model. Do not remove `quantization_config` by hand: the
tensors would be read without their scales.

## Refused

Some checkpoints of the families above compute something that a spec does not state. The import is refused, and the
error names the entry.

"""
CHECKED = "✓"
"""The mark of a comparison that a test makes."""


def render() -> str:
    """Return the page."""
    columns = ("blocks", "decode", "model_type")
    inexact = "\n".join(f"- {reason}." for reason in dict.fromkeys(INEXACT.values()))
    tail = TAIL.replace("{INEXACT}", inexact)
    refused = "".join(_refused(case) for case in REFUSED)
    return f"{HEAD}{_header(*columns)}{_families()}{tail}{_header('family', 'entry', 'reason')}{refused}"


def _header(*columns: str) -> str:
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"


def _families() -> str:
    """Return a row for the families that are alike in their blocks and in the comparison of decoding."""
    rows: dict[tuple[str, str], list[str]] = {}
    for _, family in sorted(FAMILIES.items()):
        tiny = [one for one in TINY if one.family == family.name]
        assert tiny, f"no test imports the family {family.name}"
        blocks = sorted({f"{names.stack or ''} {names.part or 'any'}".strip() for names in family.blocks})
        decoded = CHECKED if any(one.decodes for one in tiny) else ""
        rows.setdefault((", ".join(blocks), decoded), []).append(_kinds(family))
    return "".join(f"| {blocks} | {decoded} | {', '.join(kinds)} |\n" for (blocks, decoded), kinds in rows.items())


def _kinds(family: Family) -> str:
    return ", ".join(f"`{kind}`" for kind in sorted(family.model_types)) or f"{family.name} (by tensor names)"


def _refused(case: Refused) -> str:
    value = case.config.get(case.entry, next(iter(case.config.values())))
    value = value.get(case.entry, value) if isinstance(value, dict) else value
    shown = value[0] if isinstance(value, list) else value
    return f"| {case.family} | `{case.entry}`: `{shown}` | {case.why} |\n"


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
