"""Generator of the names in ``docs/cost-model.md``: ``python -m tools.docs.names_page`` writes them."""

from attention_service.core.methods import METHODS, Approximation
from attention_service.runtime.operations.complexity.growth import LETTERS
from attention_service.runtime.operations.complexity.shape_cost import TENSORS
from tools.docs.page_parts import with_part
from tools.docs.snippets import ROOT

PAGE = ROOT / "docs" / "cost-model.md"
HEAD = """
## Names in the answers about cost

### Letters of orders

These letters appear in `growth.time_order` and `growth.memory_order`, as in `O(n²·d)`.

| letter | meaning |
|---|---|
"""
MEMORY = """
### Tensors of memory

`memory` lists the bytes held per tensor, for each step of a forward pass, and of a forward pass with its backward
pass. Inputs, q, k, v, scores, weights, context and output are those of [conventions.md](conventions.md).
A tensor that a step does not hold is absent. The largest forward step is
`peak_bytes.request`, and the largest backward step is `peak_bytes.gradients`, each less a page of 4,096 bytes for
small tensors.

| name | meaning |
|---|---|
"""


def section() -> str:
    """Return the section."""
    letters = [f"| {letter} | {meaning} |" for letter, meaning in LETTERS.items()]
    for entry in METHODS:
        method = entry.make(entry.options.model_construct())  # the letters do not depend on the options
        if isinstance(method, Approximation):
            own = method.letters().items()
            letters += [f"| {letter}, of method `{entry.name}` | {meaning} |" for letter, meaning in own]
    tensors = [f"| `{name}` | {meaning} |" for name, meaning in dict(TENSORS.values()).items()]
    return HEAD + "\n".join(letters) + "\n" + MEMORY + "\n".join(tensors) + "\n"


def render() -> str:
    """Return the page with the present section."""
    return with_part(PAGE, "names", "tools.docs.names_page", section())


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
