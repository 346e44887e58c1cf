"""The table of model types as a page of the documents."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from functools import partial
from importlib.metadata import version
from typing import Final

from attention_service.models.folders.spread_models import SPREAD_TYPES
from tools.docs.snippets import ROOT
from tools.models_walk.differences import CLOSE
from tools.models_walk.found import Found
from tools.models_walk.joined import BOUND
from tools.models_walk.questions import QUESTIONS

PAGE: Final = ROOT / "docs" / "models-table.md"
_PAGE: Final = """# Models of transformers, one by one

`python -m tools.models_walk` made this page on {date}, with transformers {transformers} and torch {torch}, in float32
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
  alone, or that batch is refused.
- *implicit*: of layers that mix tokens by a running state, the largest difference of their
  [implicit weights](models.md#layers-without-a-softmax) times values from their own output in transformers, in float64.
- *import*: the family by which the service imports its layers as [modules](checkpoints.md).
- *devices*: *two* if models of the type may be [spread over devices](scale.md#a-model-on-several-devices): two
  processes answer as one does, in float64 within 1e-12 (`python -m tools.models_walk.two_devices`).
- *forms*: the heads besides that for tokens with which its checkpoints open: *classes* of texts, of *tokens*, of
  *images* or of *objects* in images, *answers* in a text, a *choice* of texts. Their numbers are not compared here.

**{whole} model types are whole**, of {all} that predict tokens or read tokens, images or sounds. {observed} of them are
observed. Every number compared differs by less than {close:g}.
{most}
Of those that generate, texts of any lengths share passes in {unlike}, texts of one length in {alike} more, and none in
{apart}; joined logits differ by at most {joined:.1e} of the largest (the bound is {bound:g}).

{head}
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|
{rows}

## The younger questions

Of the {younger} types that read the tokens of a text, each is asked of a text of 9 tokens, of one of 5, and of both in
one pass, whose numbers are to be those of each text alone. A model that mixes padding into its texts, as some do in
transformers, makes vectors of them one by one, and is asked the rest of the longer one. Numbers are errors as above;
effects below 0.001 count as 0.001.

- *embeddings*: the vectors of [texts](compare.md), by the model's own pooling and by their means, beside the last
  states of transformers.
- *similarity*: the cosines of two pairs of texts in one pass and gradient · embedding of each token, beside feeding the
  embeddings of each text to transformers and differentiating.
- *lens*: at two positions, the last layer's reading is the logits of transformers, and all parts of a logit add up to
  it.
- *effects*: each of a sweep over heads of the first and the last attention, and of the first layer that mixes tokens by
  a running state, is the difference of two passes: without the head's part in transformers, by hooks of plain PyTorch
  where one matrix takes all heads, and with the same edit.
- *paths*: those from the embeddings, the heads and the MLP of a layer to the logits are the passes of transformers
  whose last states change as what each adds does, by hooks of plain PyTorch: if it adds nothing, and if it adds what it
  makes of another text.
- *context*: the log-probability of each sentence of an answer without a source, left out or hidden in all layers, is
  that of a pass of its own, and `gradient` that of transformers. Where texts can be rows of one pass, all sources are.
- *shared*: the logits and the weights of three requests in one pass, one with an edit, are those of each alone.
- *point mlp*, *point hidden*, *point embeddings*: what the MLP of the first and of the last layer adds, the state after
  these layers, and what the table of tokens returns. Each is that of a hook of plain PyTorch on the module in
  transformers, and the model's output is that of a hook which adds the same vector to every token there.
- *point router*: the weights of the experts of the first and the last layer that has any are those that a hook on the
  module of the experts sees. The output is that of a hook which halves them and takes the weight of one expert. If the
  model predicts the next token, the gradient of a logit by them is that of autograd behind such a hook, in float64.

| question | answered | refused | faults | largest error |
|---|---|---|---|---|
{counts}

### The younger questions by type

A number behind *refused* is that of the reason below.

| type | {questions} |
|---|---|---|---|---|---|---|---|---|---|---|---|
{asked}

### Reasons of refusals

| refused | reason | types |
|---|---|---|
{refusals}

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
    "| import | forms | devices |"
)


def page(found: Sequence[Found]) -> str:
    """Write the page from what was found."""
    ordered = sorted(found, key=lambda each: each.kind)
    whole = [each for each in ordered if each.equal]
    others = [each for each in ordered if not each.equal]
    counts = Counter(_sort(each) for each in others)
    largest = max((each.whole or 0 for each in whole), default=0)
    kinds = Counter(each.joined for each in whole)
    refusals = _reasons(whole)
    numbers = {reason: number for number, reason in enumerate(refusals, 1)}
    return _PAGE.format(
        head=_HEAD,
        unlike=kinds["unlike"], alike=kinds["alike"], apart=kinds["no"], bound=BOUND,
        joined=max((each.apart or 0 for each in whole), default=0),
        date=date.today(), transformers=version("transformers"), torch=version("torch").partition("+")[0],
        whole=len(whole), all=len(ordered), observed=sum(each.way == "observed" for each in whole), close=CLOSE,
        most=f"The largest difference of a whole pass is {largest:.1e}.",
        questions=" | ".join(QUESTIONS),
        younger=sum(map(_is_asked, whole)), counts="\n".join(map(partial(_counted, whole), QUESTIONS)),
        asked="\n".join(_asked(each, numbers) for each in whole if _is_asked(each)),
        refusals="\n".join(
            f"| {number} | {_cell(reason)} | {', '.join(f'{name} {count}' for name, count in counts.items())} |"
            for number, (reason, counts) in enumerate(refusals.items(), 1)
        ),
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
    cells += ("two" if each.kind in SPREAD_TYPES else "–",)
    return f"| {' | '.join((each.kind, each.architecture, each.way, str(each.layers), *errors, *cells))} |"


def _is_asked(each: Found) -> bool:
    return bool(each.asked or each.refused)


def _counted(whole: Sequence[Found], name: str) -> str:
    """The row of one question: the types that answer, refuse and fail, and the largest error."""
    answered = [each.asked[name] for each in whole if name in each.asked]
    refused = sum(name in each.refused for each in whole)
    faults = sum(name in each.reasons for each in whole) + sum(number >= CLOSE for number in answered)
    return f"| {name} | {len(answered)} | {refused} | {faults} | {max(answered, default=0):.0e} |"


def _reasons(whole: Sequence[Found]) -> Mapping[str, Counter[str]]:
    """The reasons of refusals, the most common first, and the number of types for which each question has it."""
    counts: dict[str, Counter[str]] = {}
    for name in QUESTIONS:
        for each in whole:
            if name in each.refused:
                counts.setdefault(_reason(each, name), Counter())[name] += 1
    return dict(sorted(counts.items(), key=lambda pair: -pair[1].total()))


def _asked(each: Found, numbers: Mapping[str, int]) -> str:
    """The row of one type: the error of each question, or the number of the reason for which it is refused."""
    cells = [
        f"{each.asked[name]:.0e}" if name in each.asked
        else f"refused: {numbers[_reason(each, name)]}" if name in each.refused else "fault" for name in QUESTIONS
    ]  # fmt: skip
    return f"| {' | '.join((each.kind, *cells))} |"


def _reason(each: Found, question: str) -> str:
    """A reason without the field at fault, the names of classes, and numbers of layers."""
    reason = re.sub(rf"\b{each.architecture}\b", "the model", each.refused[question])
    plain = reason.partition(": ")[2] if re.match(r"[\w.]+: ", reason) else reason
    plain = re.sub(r"\b[A-Z]\w*(For|Model|LMHead|Encoder|Decoder)\w*", "the model", plain)
    return re.sub(r"layer [\w.]*\d\b", "layer n", plain).partition(";")[0]


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
    table = re.split(r"\n##+ ", PAGE.read_text("utf-8").partition(heading)[2])[0]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines() if line.startswith("| ")][1:]
    return {row[0].strip(): [each.strip() for each in row] for row in cells}
