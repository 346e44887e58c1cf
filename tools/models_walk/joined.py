"""Texts that share passes beside the same texts alone: which of a type join, and how far their logits differ."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from attention_contract.schemas.openai import CompletionRequest
from attention_contract.validation import validate
from attention_service.models.generation.decoding.decoder import Decoder
from attention_service.models.generation.decoding.running_text import RunningText
from attention_service.models.generation.generation import RunningGeneration
from attention_service.models.generation.generation_turns import read_prompts
from attention_service.models.generation.plans.generation_plan import plan_generation
from attention_service.models.loaded.loaded_model import LoadedModel

UNLIKE = [[3, 4, 5], [8, 3, 7, 9, 10], [6]]
ALIKE = [[3, 4, 5], [8, 3, 7], [6, 5, 9]]
BOUND = 1e-5
"""The largest difference of float32 logits, as a share of the largest logit."""


@dataclass(frozen=True)
class Steps:
    """The passes of one text behind the one that reads its prompt."""

    logits: list[Tensor]
    """``[V]`` of each pass."""
    tokens: list[int]
    weights: list[np.ndarray]
    """Those of all layers, by pass."""
    shared: list[int]
    """The texts of each pass."""


@dataclass(frozen=True)
class Joined:
    """What joined texts have and do."""

    kind: str
    """Which share passes: ``unlike`` in length, ``alike`` or ``no``."""
    differ: float | None = None
    """The largest difference from alone, as a share of the largest logit."""
    weights: float | None = None
    """The largest difference of a weight."""
    tokens: bool = True
    """True if each has its greedy tokens, but for ties within the bound."""
    reason: str | None = None
    """Why no texts of unlike lengths share passes."""


def joined(loaded: LoadedModel, new: int, prompts: Sequence[Sequence[int]] | None = None) -> Joined:
    """Run greedy texts alone and joined; the joined take the tokens of those alone, so that all passes compare."""
    decoder = Decoder(loaded)
    try:
        joining = decoder.joining
        kind = "unlike" if joining.unlike else "alike" if joining.alike else "no"
        if kind == "no":
            return Joined(kind, reason=joining.reason)
        given = prompts or (UNLIKE if joining.unlike else ALIKE)
        alone = [run(decoder, [prompt], new, alone=True)[0] for prompt in given]
        together = run(decoder, given, new, forced=[each.tokens for each in alone])
        if any(count != len(given) for each in together for count in each.shared):
            raise AssertionError(f"expected passes of {len(given)} texts, got {[each.shared for each in together]}")
    finally:
        decoder.close()
    pairs = [
        (a, b)
        for own, other in zip(together, alone, strict=True)
        for a, b in zip(own.logits, other.logits, strict=True)
    ]
    most = max(float(b.abs().max()) for _, b in pairs)
    weights = [
        float(np.abs(a - b).max(initial=0))
        for own, other in zip(together, alone, strict=True)
        for a, b in zip(own.weights, other.weights, strict=True)
    ]
    return Joined(
        kind, max(float((a - b).abs().max()) for a, b in pairs) / most, max(weights, default=0.0),
        all(_same(a, b, BOUND * most) for a, b in pairs), joining.reason,
    )  # fmt: skip


def _same(found: Tensor, expected: Tensor, tie: float) -> bool:
    """True if the likeliest token is one of the likeliest of the expected logits."""
    return float(expected.max() - expected[int(found.argmax())]) <= 2 * tie


def run(
    decoder: Decoder, prompts: Sequence[Sequence[int]], new: int, *, alone: bool = False,
    forced: Sequence[Sequence[int]] | None = None,
) -> list[Steps]:  # fmt: skip
    """Generate after several prompts at once, each a request of its own."""
    loaded, running = decoder.loaded, list[RunningGeneration]()
    found = {}
    for number, prompt in enumerate(prompts):
        fields = {
            "model": loaded.name,
            "prompt": [*prompt],
            "max_tokens": new + 1,
            "temperature": 0,
            "attention": {"weights": True} if loaded.places else None,
        }
        request = validate(CompletionRequest, fields)
        plan = replace(plan_generation(loaded, request), alone=alone, ends=frozenset())
        generation = RunningGeneration(decoder, request, plan, lambda _: None)
        while generation.unread:
            for fault in read_prompts(decoder, [generation], 10_000).values():
                raise fault
        (text,) = generation.texts
        running.append(generation)
        found[id(text)] = Steps([], [], [], []), number, generation
        text.ids[-1] = 7
    for step in range(new):
        texts: list[RunningText] = [text for each in running for text in each.texts]
        for each in decoder.step(texts):
            if each.fault is not None:
                raise each.fault
            own, number, generation = found[id(each.text)]
            own.logits.append(each.logits[0].clone())
            own.weights.extend(np.asarray(layer["weights"]) for layer in each.layers or ())
            own.shared.append(each.joined)
            own.tokens.append(each.token)
            generation.take([each._replace(token=each.token if forced is None else forced[number][step])])
    return [own for own, _, _ in found.values()]
