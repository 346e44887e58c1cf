"""The effect of each head of a model of GPT-2's size: one sweep, beside a forward pass for each head.

``python -m benchmarks.effects`` prints the table; ``--output benchmarks/results/effects.md`` writes it.
"""

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Final

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from attention_contract.schemas.analyses.model_effects import ModelEffectsReply, ModelEffectsRequest
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_contract.validation import validate
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.sweeps.swept_effects import EffectsOfSweep
from attention_service.models.costs.answer_parts import at_once
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.runtime.device.torch_device import Device
from benchmarks.page import parser, publish

LENGTH: Final = 64
SWEEP: Final = {"tap": "context", "over": ["layers", "heads"], "set": 0}
TEXT = f"""GPT-2's 12 layers of 12 heads with random parameters, float32, a text of {LENGTH} tokens, one thread. The
sweep knocks out each head in turn. The baseline asks `forward` once for each head, with that edit. Both run in this
process. Times are of the processor, since other programs run beside. The difference is that of the change of log p."""


def sweep(loaded: LoadedModel, ids: list[int]) -> ModelEffectsReply:
    """Knock out every head in one request."""
    effects = EffectsOfSweep(loaded, validate(ModelEffectsRequest, {"tokens": ids, "sweep": SWEEP}))
    return at_once(effects.parts(ModelCosts(loaded).memory.copies_at_once(effects.sizes, effects.copies, 2**33)))


def one_by_one(loaded: LoadedModel, ids: list[int], token: int) -> np.ndarray:
    """Ln p of a token without each head, by a forward pass for each."""
    found = np.zeros((loaded.model.config.n_layer, loaded.model.config.n_head))
    for layer, head in np.ndindex(found.shape):
        edits = {str(layer): [{"tap": "context", "heads": [head], "set": 0}]}
        fields = {"tokens": ids, "edits": edits, "return": ["logits"]}
        logits = np.asarray(forward_reply(loaded, validate(ModelForwardRequest, fields)).logits[0], np.float64)
        found[layer, head] = logits[token] - np.logaddexp.reduce(logits)
    return found


def _seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def lines(rounds: int) -> Iterator[str]:
    """The table, a row for each way."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config()).eval().requires_grad_(False)
    loaded = LoadedModel("gpt2", model, None, Device.open("cpu"))
    ids = torch.randint(model.config.vocab_size, (LENGTH,)).tolist()
    reply = sweep(loaded, ids)  # and the trials of the layers
    assert reply.token is not None
    token = reply.token[0]
    expected = one_by_one(loaded, ids, token) - reply.baseline
    sweeps, singles = [], []
    for _ in range(rounds):
        sweeps.append(_seconds(lambda: sweep(loaded, ids)))
        singles.append(_seconds(lambda: one_by_one(loaded, ids, token)))
    ratio = median(ours / theirs for ours, theirs in zip(sweeps, singles, strict=True))
    yield "| effects of 144 heads | processor seconds | of the baseline |"
    yield "|---|---:|---:|"
    yield f"| a forward pass for each | {median(singles):.1f} | 1 |"
    yield f"| one sweep | {median(sweeps):.1f} | {ratio:.2f} |"
    yield ""
    yield f"Largest difference: {np.abs(expected - reply.effects.value).max():.1e}"


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__, 3).parse_args()
    rounds = options.rounds or (1 if options.quick else 3)
    publish("Effects of every head", TEXT, lines(rounds), options.output, ("torch", "transformers"))


if __name__ == "__main__":
    main()
