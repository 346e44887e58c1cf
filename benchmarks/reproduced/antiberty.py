"""Pseudo log-likelihoods of antibodies by AntiBERTy, each residue masked in turn.

Source: Ruffolo et al. 2021, arXiv 2112.07782; the sequences are those of the package's description.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from attention_client import Client
from benchmarks.reproduced.package import Line, Package, convert

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


def _models() -> Path:
    return PACKAGE.environment.site / "antiberty" / "trained_models"


def write(models: Path) -> None:
    """Write the checkpoint. Its heads for species and chains are left out: the likelihoods do not need them."""
    folder = models / "antiberty"
    convert(_models() / "AntiBERTy_md_smooth", folder, "BertForMaskedLM")
    shutil.copy(_models() / "vocab.txt", folder)
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")


def lines(client: Client) -> Iterator[Line]:
    """Both likelihoods of each sequence: the mean over its residues.

    The package gives special tokens no probability. The model gives them less than 1e-8, which its head has learned.
    """
    texts = [" ".join(sequence) for sequence in SEQUENCES]
    found = client.models.forward("antiberty", texts, likelihood="masked", timeout=900).likelihood
    for sequence, theirs, ours in zip(SEQUENCES, PACKAGE.run(THEIRS, SEQUENCES), found, strict=True):
        if len(ours.tokens) != len(sequence):
            raise ValueError(f"{len(sequence)} residues are {len(ours.tokens)} tokens")
        yield Line(f"{sequence[:8]}…, {len(sequence)} residues", theirs, float(ours.mean), 1e-5)
