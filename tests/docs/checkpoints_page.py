"""Generator of ``docs/checkpoints.md``: ``python -m tests.docs.checkpoints_page`` writes it from registry and tests."""

from attention_service.modules.checkpoints.families import FAMILIES, INEXACT
from attention_service.modules.checkpoints.family import Family
from tests.docs.snippets import ROOT
from tests.modules.checkpoints.refused import REFUSED, Refused
from tests.modules.checkpoints.test_families import GRADIENTS, OUTPUT, TINY, WEIGHTS

PAGE = ROOT / "docs" / "checkpoints.md"
HEAD = f"""# Checkpoints

A checkpoint is a folder in the model repository (`ATTENTION_MODELS_DIR`) with safetensors files, sharded or not, and
a `config.json` beside them; or one safetensors file. Other formats are refused, since reading them can run code:
`AutoModel.from_pretrained(folder).save_pretrained(folder)` of transformers converts one.

```console
attention checkpoints                      # what the model repository holds
attention checkpoints gpt2                 # each attention layer: heads, widths, spec
attention import gpt2 --layer 3            # one layer, as the module gpt2.3
attention import gpt2 --all                # every layer, or none
attention import openai-community/gpt2     # fetched from the Hugging Face hub (extra hub), then imported
```

The server fetches from the hub only where its operator allows it (`ATTENTION_HUB=true`). Otherwise the command
fetches into the model repository of the machine on which it runs. Only tensors, configs and tokenizers are fetched,
no code and no pickled file.

## What an import computes

`model_type` in `config.json` chooses the family, and the family's function makes the spec from the other entries. An
entry that is left out has the default of its class in transformers. The fields of `spec` in the request replace
those of the checkpoint: `--spec '{{"softcap": 30}}'` adds a softcap, and `--spec '{{"masks": []}}'` removes the
causal mask.

Where a fact is missing that changes the numbers, the import is 422 and `param` names the field: `num_heads`,
`spec.masks` or `spec.add_zero_attn`. A state dict of `torch.nn.MultiheadAttention` has none of these facts. A layer
of `torch.nn.Transformer` tells all but its heads and the masks of self-attention. A checkpoint of BERT without
`config.json` does not tell its masks.

The module takes the input of the attention block, after the norm before it, and gives its output, before the
residual sum. Dropout is not part of the spec: a request asks for it. Fused and transposed tensors are cut into
`q_proj`, `k_proj` and `v_proj`. The parts of a file that are read are memory-mapped, so a module takes its own bytes
once.

## Families

Tests build a tiny model of each family with random weights, save it, import its blocks, and compare them in float32
with the eager attention of transformers. Differences are at most {OUTPUT:.0e} of the output and {WEIGHTS:.0e} of the
weights; gradients of all parameters differ by at most {GRADIENTS:.0e} of the largest. "decode" computes the sequence
in three parts with a past. Every `model_type` of the table has such a model.

"""
TAIL = """
A checkpoint of another `model_type` is refused. `layer` counts the groups of ALBERT's layers, which share one block.
Longformer's global tokens come with each request, as `global_mask`. The `model_type` of a part of `config.json`
(`text_config`, `vision_config`, `encoder`, `decoder`) chooses the family of that stack. A part without one takes it
from the whole: `clip_text_model` for the text of `clip`.

Some families cannot be exact, and the refusal says why:

{INEXACT}

A bias is taken where the class of transformers makes one by `config.json` (`attention_bias`, `qkv_bias`, `use_bias`
and so on). One that it denies is left out, and `source.ignored` of the module names it. One that it asks for and that
the checkpoint lacks is refused. A `quantization_config` is refused, since transformers computes other numbers by it,
unless it names the attention among the modules that stay as they are (`modules_to_not_convert`).

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
