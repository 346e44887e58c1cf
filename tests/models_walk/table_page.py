"""The table of model types as a page of the documents."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import date
from importlib.metadata import version
from typing import Final

from tests.docs.snippets import ROOT
from tests.models_walk.compared import CLOSE, Found
from tests.models_walk.joined import BOUND

PAGE: Final = ROOT / "docs" / "models-table.md"
_PAGE: Final = """# Models of transformers, one by one

`python -m tests.models_walk` made this page on {date}, with transformers {transformers} and torch {torch}, in float32
on a CPU. It builds each model type small, from the type's own config with few layers and heads and with random
parameters, and holds the [whole model](models.md) against its eager self in transformers. Numbers are the largest
difference, as a share of the largest number that is compared.

- *way*: the attentions are *computed* by the server where the model asks the attention interface of transformers, or
  *observed* where the model computes its weights itself ([more](models.md#computed-or-observed)). A model whose
  layers all mix tokens by a running state has no attention, and no way.
- *whole*: the logits of a text of 9 tokens, or its last hidden states; of a model that reads images alone, those of
  an image; of a pair of encoders, the vectors of a text and of an image, and the similarity of both.
- *weights*: those of every attention, by the eager function of the model's own file, or as the model returns them
  itself (`output_attentions`).
- *gradients*: of log p(token) after the text, by the embeddings of its tokens.
- *tokens*: those of `generate` for each of three prompts alone, 6 after each: the likeliest, and those drawn after a
  seed. Here the three run at once.
- *joined*: which texts share the passes that generate, *unlike* ones of any lengths, *alike* ones of the same length or
  *no* texts, and the largest difference of logits from those of the same texts alone, over 6 tokens of three texts.
- *invariants*: the largest error of what holds for any model: weights times values are the context, rows sum to one
  less their sink, edits by a factor of one change nothing, and a text of a padded batch gives the numbers that it gives
  alone.
- *implicit*: of layers that mix tokens by a running state, the largest difference of their
  [implicit weights](models.md#layers-without-a-softmax) times values from their own output in transformers, in float64.
- *import*: the family by which the service imports its layers as [modules](checkpoints.md).
- *forms*: the heads besides that for tokens with which its checkpoints open: *classes* of texts, of *tokens*, of
  *images* or of *objects* in images, *answers* in a text, a *choice* of texts. Their numbers are not compared here.

**{whole} model types are whole**, of {all} that predict tokens or read tokens, images or sounds. {observed} of them are
observed. Every number compared differs by less than {close:g}.
{most}
Of those that generate, texts of any lengths share passes in {unlike}, texts of one length in {alike} more, and none in
{apart}; joined logits differ by at most {joined:.1e} of the largest (the bound is {bound:g}).

{head}
|---|---|---|---|---|---|---|---|---|---|---|---|---|
{rows}

## What is not compared, or differs

| type | part | reason |
|---|---|---|
{parts}

## Types that are not whole

{reasons}

| type | reason |
|---|---|
{others}
"""


_HEAD: Final = (
    "| type | class | way | attentions | whole | weights | gradients | tokens | joined | invariants | implicit "
    "| import | forms |"
)


def page(found: Sequence[Found]) -> str:
    """Write the page from what was found."""
    ordered = sorted(found, key=lambda each: each.kind)
    whole = [each for each in ordered if each.equal]
    others = [each for each in ordered if not each.equal]
    counts = Counter(_sort(each) for each in others)
    largest = max((each.whole or 0 for each in whole), default=0)
    kinds = Counter(each.joined for each in whole)
    return _PAGE.format(
        head=_HEAD,
        unlike=kinds["unlike"], alike=kinds["alike"], apart=kinds["no"], bound=BOUND,
        joined=max((each.apart or 0 for each in whole), default=0),
        date=date.today(), transformers=version("transformers"), torch=version("torch").partition("+")[0],
        whole=len(whole), all=len(ordered), observed=sum(each.way == "observed" for each in whole), close=CLOSE,
        most=f"The largest difference of a whole pass is {largest:.1e}.",
        rows="\n".join(map(_row, whole)), parts="\n".join(_parts(whole)),
        reasons="; ".join(f"{count} {reason}" for reason, count in counts.most_common()) + ".",
        others="\n".join(f"| {each.kind} | {_cell(_why(each))} |" for each in others),
    )  # fmt: skip


def summary(found: Sequence[Found]) -> str:
    """Say in one line how many types are whole."""
    whole = [each for each in found if each.equal]
    observed = sum(each.way == "observed" for each in whole)
    return f"{len(whole)} of {len(found)} types whole, {observed} of them observed"


def _row(each: Found) -> str:
    tokens = {None: "–", True: "equal", False: "differ"}[each.generated]
    numbers = [each.whole, each.weights, each.gradients, each.apart, each.invariants, each.implicit]
    *errors, apart, held, implicit = (f"{x:.0e}" if x is not None else "–" for x in numbers)
    joined = each.joined if each.apart is None else f"{each.joined} {apart}"
    cells = tokens, joined or "–", held, implicit, each.family or "–", ", ".join(each.forms) or "–"
    return f"| {' | '.join((each.kind, each.architecture, each.way, str(each.layers), *errors, *cells))} |"


def _parts(whole: Iterable[Found]) -> Iterable[str]:
    for each in whole:
        for part, reason in each.reasons.items():
            if part != "import":
                yield f"| {each.kind} | {part} | {_cell(reason)} |"


def _why(each: Found) -> str:
    return each.reasons.get("whole") or f"its whole pass differs by {each.whole:.1e}"


def _sort(each: Found) -> str:
    """Sort a reason into one of a few kinds."""
    why = _why(each)
    if why.startswith("not built small"):
        return "cannot be built from a shrunk config by this walk"
    if why.startswith("it reads"):
        return "read something else than tokens or images"
    if "passes no attention" in why:
        return "have no weights over pairs of tokens that are seen"
    return "do not run or differ"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("`", "").replace("<", "&lt;").removeprefix("checkpoint: ")


def rows(heading: str) -> dict[str, list[str]]:
    """Return the rows of the table below a heading of the page, by their first cell."""
    table = PAGE.read_text("utf-8").partition(heading)[2].partition("\n## ")[0]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines() if line.startswith("| ")][1:]
    return {row[0].strip(): [each.strip() for each in row] for row in cells}
