"""``docs/cost-names.md``, made from the code that uses them: ``python -m tests.docs.names_page`` writes it anew."""

from attention_service.core.methods import METHODS, Approximation
from attention_service.cost.letters import LETTERS
from attention_service.cost.told_tensors import TENSORS
from tests.docs.snippets import ROOT

PAGE = ROOT / "docs" / "cost-names.md"
HEAD = """# Names in the answers about cost

Written by `python -m tests.docs.names_page` from `cost/letters.py`, the methods, and `cost/told_tensors.py`.

## Letters of orders

What the letters in `growth.time_order` and `growth.memory_order` stand for, as in `O(n²·d)`. Each reply explains those
that it uses, in `growth.letters`.

| letter | what it stands for |
|---|---|
"""
MEMORY = """
## Tensors of memory

The names in `memory`: for each step of a forward pass, and of a forward and a backward pass together, the bytes that
are held by tensor. Inputs, q, k, v, scores, weights, context and output are those of [conventions.md](conventions.md);
"intermediates" are what lies between two of them while a step runs. What a step has not got, or no longer, is not
there. The largest forward step is `peak_bytes.request` and the largest backward one `peak_bytes.gradients`, each less a
page of 4,096 bytes for what is too small to count.

| name | what it is |
|---|---|
"""


def render() -> str:
    """The whole page."""
    letters = [f"| {letter} | {meaning} |" for letter, meaning in LETTERS.items()]
    for entry in METHODS:
        method = entry.make(entry.options.model_construct())  # whatever its options are
        if isinstance(method, Approximation):
            own = method.letters().items()
            letters += [f"| {letter}, of method `{entry.name}` | {meaning} |" for letter, meaning in own]
    tensors = [f"| `{name}` | {meaning} |" for name, meaning in dict(TENSORS.values()).items()]
    return HEAD + "\n".join(letters) + "\n" + MEMORY + "\n".join(tensors) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
