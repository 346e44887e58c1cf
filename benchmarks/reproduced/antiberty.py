"""Pseudo log-likelihoods of antibodies by AntiBERTy, each residue masked in turn.

Source: Ruffolo et al. 2021, arXiv 2112.07782; the sequences are those of the package's description.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from attention_client import Client
from benchmarks.reproduced.package import Line, Package, convert, log_probabilities, vocabulary

PACKAGE: Final = Package("antiberty==0.1.3", ("transformers==4.57.3", "tqdm"))
SEQUENCES: Final = (
    "EVQLVQSGPEVKKPGTSVKVSCKASGFTFMSSAVQWVRQARGQRLEWIGWIVIGSGNTNYAQKFQERVTITRDMSTSTAYMELSSLRSEDTAVYYCAAPYCSSISCNDGFDIWGQGTMVTVS",
    "DVVMTQTPFSLPVSLGDQASISCRSSQSLVHSNGNTYLHWYLQKPGQSPKLLIYKVSNRFSGVPDRFSGSGSGTDFTLKISRVEAEDLGVYFCSQSTHVPYTFGGGTKLEIK",
)
THEIRS: Final = """
import json, sys
from antiberty import AntiBERTyRunner
print(json.dumps(AntiBERTyRunner().pseudo_log_likelihood(json.load(sys.stdin), batch_size=16).tolist()))
"""
BATCH: Final = 16


def _models() -> Path:
    return PACKAGE.environment.site / "antiberty" / "trained_models"


def write(models: Path) -> None:
    """Write the checkpoint. Its heads for species and chains are left out: the likelihoods do not need them."""
    convert(_models() / "AntiBERTy_md_smooth", models / "antiberty", "BertForMaskedLM")


def lines(client: Client) -> Iterator[Line]:
    """Both likelihoods of each sequence: the mean over its residues."""
    for sequence, theirs in zip(SEQUENCES, PACKAGE.run(THEIRS, SEQUENCES), strict=True):
        yield Line(f"{sequence[:8]}…, {len(sequence)} residues", theirs, _likelihood(client, sequence), 1e-5)


def _likelihood(client: Client, sequence: str) -> float:
    ids = vocabulary(_models() / "vocab.txt")
    residues = np.array([ids[residue] for residue in sequence])
    special = [number for token, number in ids.items() if token.startswith("[")]
    rows = np.tile([ids["[CLS]"], *residues, ids["[SEP]"]], (len(residues), 1))
    places = np.arange(len(residues))
    rows[places, places + 1] = ids["[MASK]"]
    likelihoods: list[float] = []
    for chosen in np.split(places, range(BATCH, len(places), BATCH)):
        # A row has one mask, and the positions of a request are those of every row.
        reply = client.models.forward(
            "antiberty", tokens=rows[chosen].tolist(), return_=["logits"], positions=(chosen + 1).tolist(), top_k=0
        )
        logits = np.einsum("bbv->bv", np.array(reply.logits, np.float64))
        logits[:, special] = -np.inf
        likelihoods += log_probabilities(logits)[np.arange(len(chosen)), residues[chosen]].tolist()
    return float(np.mean(likelihoods))
