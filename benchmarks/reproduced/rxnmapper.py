"""Maps of the atoms of reactions, which RXNMapper reads off head 5 of layer 10.

Source: Schwaller et al. 2021, Science Advances 7 (15), eabe4166; the reactions, maps and confidences are those that the
wheel's own tests expect.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from attention_client import Client
from benchmarks.reproduced.package import Line, Package, convert

PACKAGE: Final = Package(
    "rxnmapper==0.4.3",
    ("transformers==4.57.3", "rxn-chem-utils==1.6.0", "pandas", "scipy", "rdkit", "setuptools<81"),
)
LAYER, HEAD = 10, 5
"""The package's ``layers`` and ``head``, counted from 0."""
THEIRS: Final = """
import json, sys
import numpy as np, torch
from rxnmapper import RXNMapper
from rxnmapper.smiles_utils import number_tokens
reactions, weights, file = json.load(sys.stdin)
mapper, answers, every = RXNMapper(), [], {}
for number, (reaction, canonicalize) in enumerate(reactions):
    if weights:  # of the server, in the place of the package's
        mapper.convert_batch_to_attns = lambda *_, **__: [torch.tensor(weights[number])]
    answer, = mapper.get_attention_guided_atom_maps([reaction], canonicalize_rxns=canonicalize, detailed_output=True)
    tokens = answer["tokens"]
    ids = mapper.tokenizer.convert_tokens_to_ids(tokens)
    if not weights:
        with torch.no_grad():
            every[str(number)] = torch.cat(mapper.model(torch.tensor([ids])).attentions).numpy()
    atoms = [place for place, atom in enumerate(number_tokens(tokens)) if atom >= 0]
    reactants = [place for place in atoms if place < tokens.index(">>")]
    products = atoms[len(reactants):]
    pairs = [(product, reactants[atom]) for product, atom in zip(products, answer["pxr_mapping_vector"]) if atom >= 0]
    answers.append({"map": answer["mapped_rxn"], "confidence": float(answer["confidence"]), "ids": ids,
                    "reactants": reactants, "pairs": pairs})
np.savez(file, **every)
print(json.dumps(answers))
"""


def write(models: Path) -> None:
    """Write the checkpoint. It has no tokenizer that a server could read, so reactions are sent as tokens."""
    folder = PACKAGE.environment.site / "rxnmapper" / "models" / "transformers" / "albert_heads_8_uspto_all_1310k"
    convert(folder, models / "rxnmapper", "AlbertForMaskedLM")


def lines(client: Client) -> Iterator[Line]:
    """The confidence of each map, the maps, the weights of all heads, and two numbers about single heads."""
    published = list(_published())
    reactions = [(reaction, canonicalize) for reaction, _, canonicalize in published]
    with NamedTemporaryFile(suffix=".npz") as file:
        theirs = PACKAGE.run(THEIRS, [reactions, None, file.name])
        their_weights = [*np.load(file.name).values()]
        weights = [_weights(client, answer["ids"]) for answer in theirs]
        of_head = [every[LAYER, HEAD].tolist() for every in weights]
        ours = PACKAGE.run(THEIRS, [reactions, of_head, file.name])
    for (reaction, expected, _), answer in zip(published, ours, strict=True):
        yield Line(f"confidence of `{reaction[:24]}…`", expected["confidence"], answer["confidence"], 1e-5)
    maps = [answer["map"] == expected["mapped_rxn"] for (_, expected, _), answer in zip(published, ours, strict=True)]
    yield Line("maps that are equal", len(published), sum(maps), 0)
    differences = [abs(mine - other).max() for mine, other in zip(weights, their_weights, strict=True)]
    yield Line("weights of 96 heads, largest difference", 0, max(differences), 1e-4)
    (first, share), (their_first, their_share) = _partners(weights, theirs), _partners(their_weights, theirs)
    atoms = sum(len(answer["pairs"]) for answer in theirs)
    name = f"share of {atoms} atoms that look first at their partner, head 10.5"
    yield Line(name, their_first[LAYER, HEAD], first[LAYER, HEAD], 0)
    yield Line("largest mean weight on the partner, head 8.5", their_share.max(), share[8, 5], 1e-5)


def _published() -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield each reaction of the wheel's tests, the answer that they expect, and True if it is made canonical first."""
    for test in ast.parse((PACKAGE.environment.site / "tests" / "test_mapper.py").read_text("utf-8")).body:
        values = {ast.unparse(each.targets[0]): each.value for each in ast.walk(test) if isinstance(each, ast.Assign)}
        if {"rxns", "expected"} <= values.keys():
            canonicalize = "canonicalize_rxns=False" not in ast.unparse(test)
            answers = zip(ast.literal_eval(values["rxns"]), ast.literal_eval(values["expected"]), strict=True)
            yield from ((reaction, expected, canonicalize) for reaction, expected in answers)


def _weights(client: Client, ids: list[int]) -> NDArray[Any]:
    """Return the weights ``[layers, heads, tokens, tokens]`` of a reaction."""
    reply = client.models.weights("rxnmapper", tokens=ids)
    return np.stack([np.array(layer.weights).reshape(-1, len(ids), len(ids)) for layer in reply.layers])


def _partners(weights: list[NDArray[Any]], answers: list[dict[str, Any]]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return two numbers ``[layers, heads]`` about the reactant atom that each product atom is mapped to.

    They are the share of product atoms that look at no other reactant atom more, and the mean weight on the atom.
    """
    first, share = [], []
    for every, answer in zip(weights, answers, strict=True):
        products, partners = np.array(answer["pairs"]).T
        reactants = np.array(answer["reactants"])
        first.append(reactants[every[:, :, products][..., reactants].argmax(-1)] == partners)
        share.append(every[:, :, products, partners])
    return np.concatenate(first, axis=-1).mean(-1), np.concatenate(share, axis=-1).mean(-1)
