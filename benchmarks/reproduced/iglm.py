"""Log-likelihoods of an antibody by IgLM, of the whole sequence and of a loop filled into it.

Source: Shuai, Ruffolo and Gray 2023, Cell Systems 14 (11); the sequence and the loop are those of the package's
description.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from attention_client import Client
from benchmarks.reproduced.package import Line, Package, convert, log_probabilities, vocabulary

PACKAGE: Final = Package("iglm==0.1.0", ("transformers==4.57.3", "tqdm"))
MODELS: Final = ("IgLM", "IgLM-S")
SEQUENCE: Final = (
    "EVQLVESGGGLVQPGGSLRLSCAASGFNIKEYYMHWVRQAPGKGLEWVGLIDPEQGNTIY"
    "DPKFQDRATISADNSKNTAYLQMNSLRAEDTAVYYCARDTAAYFDYWGQGTLVTVS"
)
LOOP: Final = (98, 106)
KIND: Final = ("[HEAVY]", "[HUMAN]")
THEIRS: Final = """
import json, sys
from iglm import IgLM
sequence, kind, model, loop = json.load(sys.stdin)
print(IgLM(model).log_likelihood(sequence, *kind, infill_range=loop))
"""


def _models() -> Path:
    return PACKAGE.environment.site / "iglm" / "trained_models"


def write(models: Path) -> None:
    """Write both checkpoints."""
    for name in MODELS:
        convert(_models() / name, models / name, "GPT2LMHeadModel")


def lines(client: Client) -> Iterator[Line]:
    """Both likelihoods by each model: the mean over the predicted tokens."""
    start, end = LOOP
    whole = [*KIND, *SEQUENCE, "[SEP]"]
    prompt = [*KIND, *SEQUENCE[:start], "[MASK]", *SEQUENCE[end:], "[SEP]"]
    filled = [*prompt, *SEQUENCE[start:end], "[CLS]"]
    for model in MODELS:
        for name, loop, tokens, given in (("sequence", None, whole, len(KIND)), ("loop", LOOP, filled, len(prompt))):
            theirs = PACKAGE.run(THEIRS, [SEQUENCE, KIND, model, loop])
            yield Line(f"{model}, {name}", theirs, _likelihood(client, model, tokens, given), 1e-5)


def _likelihood(client: Client, model: str, tokens: list[str], given: int) -> float:
    """Return the mean log-likelihood of the tokens after the ``given`` ones."""
    vocab = vocabulary(_models() / "vocab.txt")
    ids = [vocab[token] for token in tokens]
    positions = [*range(given - 1, len(ids) - 1)]
    reply = client.models.forward(model, tokens=ids, return_=["logits"], positions=positions, top_k=0)
    logits = np.reshape(reply.logits, (len(positions), -1))
    return float(log_probabilities(logits)[np.arange(len(positions)), ids[given:]].mean())
