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
    """The confidence of each map, the maps, the weights of all heads, and the pairs of atoms that heads link."""
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
    numbers, expected = _asked_pairs(client, theirs), _pairs_by_loops(their_weights, theirs)
    atoms = sum(len(answer["pairs"]) for answer in theirs)
    name = f"share of {atoms} atoms that look first at their partner, head 10.5"
    yield Line(name, expected["first"][LAYER, HEAD], numbers["first"][LAYER, HEAD], 1e-6)
    most = np.unravel_index(numbers["share"].argmax(), numbers["share"].shape)
    name = "largest mean weight on the partner, head {}.{}".format(*most)
    yield Line(name, expected["share"].max(), numbers["share"][most], 1e-5)
    for name, values in numbers.items():
        difference = abs(values - expected[name]).max()
        yield Line(f"`pairs` of 96 heads, {name.replace('_', ' ')}, largest difference", 0, difference, 1e-5)


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


def _asked_pairs(client: Client, answers: list[dict[str, Any]]) -> dict[str, NDArray[Any]]:
    """Ask for ``pairs`` of all product atoms and the reactant atoms that they are mapped to, ``[layers, heads]`` each.

    The candidates are the reactant atoms. The reactions are requests of their own, so each counts by its pairs.
    """
    sums: dict[str, Any] = {}
    for answer in answers:
        options = {"pairs": answer["pairs"], "candidates": answer["reactants"]}
        reply = client.models.weights(
            "rxnmapper", tokens=answer["ids"], statistics=["pairs"], statistic_options=options, return_weights=False
        )
        for name in reply.layers[0].statistics.pairs:
            own = np.stack([layer.statistics.pairs[name] for layer in reply.layers]).astype(np.float64)
            sums[name] = sums.get(name, 0) + own * len(answer["pairs"])
    atoms = sum(len(answer["pairs"]) for answer in answers)
    return {name: total / atoms for name, total in sums.items()}


def _pairs_by_loops(weights: list[NDArray[Any]], answers: list[dict[str, Any]]) -> dict[str, NDArray[Any]]:
    """Return the same numbers of weights ``[layers, heads, tokens, tokens]``, pair by pair in float64."""
    sums: dict[str, Any] = {}
    for every, answer in zip(weights, answers, strict=True):
        w = every.astype(np.float64)
        reactants, products = answer["reactants"], sorted({product for product, _ in answer["pairs"]})
        for product, partner in answer["pairs"]:
            for side, matrix, query, key, candidates in (
                ("", w, product, partner, reactants),
                ("swapped_", w, partner, product, products),
                ("both_", w + w.swapaxes(-1, -2), product, partner, reactants),
            ):
                first = np.array(candidates)[matrix[..., query, candidates].argmax(-1)] == key
                for name, value in (("share", matrix[..., query, key]), ("first", first)):
                    sums[side + name] = sums.get(side + name, 0) + value
    atoms = sum(len(answer["pairs"]) for answer in answers)
    return {name: total / atoms for name, total in sums.items()}
