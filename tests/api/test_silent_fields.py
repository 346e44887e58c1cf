"""A field of a question to a module that changes nothing of the answer is refused by its name."""

import numpy as np
import pytest

NAME = "silent-fields"
QUERY = np.random.default_rng(5).normal(size=(1, 4, 8)).tolist()
ONES = np.ones((1, 4, 8)).tolist()
READOUT = {"weight": np.eye(2, 8).tolist(), "targets": [[0] * 4]}
HEADS, ROWS = {"heads": [0]}, {"queries": [1]}


@pytest.fixture(scope="module")
def module(client):
    client.modules.create(NAME, {"d_model": 8, "num_heads": 2}, seed=1)
    return f"/v1/modules/{NAME}"


SILENT = [
    ("forward", {"average_heads": True}, "average_heads"),
    ("forward", {"return": ["q"], "average_heads": True}, "average_heads"),
    ("forward", {"select": HEADS}, "select"),
    ("forward", {"return": ["k", "v"], "select": ROWS}, "select"),
    ("gradients", {"average_heads": True}, "average_heads"),
    ("gradients", {"select": ROWS}, "select"),
    ("weights", {"return_weights": False, "average_heads": True}, "average_heads"),
    ("weights", {"return_weights": False, "select": HEADS}, "select"),
    ("weights", {"statistics": [], "normalize": "absolute"}, "normalize"),
    ("attribution", {"steps": 4}, "steps"),
    ("attribution", {"methods": ["head_importance"], "select": HEADS}, "select"),
    ("attribution", {"methods": ["norm"], "upstream": ONES}, "upstream"),
    ("attribution", {"methods": ["norm"], "readout": READOUT}, "readout"),
    ("circuits", {"parts": ["spectra"], "vectors": True}, "vectors"),
]  # fmt: skip
HEARD = [
    ("forward", {"return": ["weights"], "average_heads": True}),
    ("forward", {"return": ["v"], "select": HEADS}),
    ("forward", {"return": ["lse"], "select": ROWS}),
    ("forward", {"dropout": {"p": 0.5, "return_mask": True}, "select": HEADS}),
    ("gradients", {"return": ["weights"], "select": ROWS}),
    ("weights", {"return_weights": False, "top_k": 1, "select": HEADS}),
    ("weights", {"return_weights": False, "pool": 2, "select": HEADS}),
    ("attribution", {"methods": ["integrated"], "readout": READOUT, "steps": 4}),
    ("attribution", {"methods": ["head_importance", "norm"], "select": HEADS}),
    ("circuits", {"parts": ["ov"], "vectors": True}),
]


def asked(http, module, question, fields):
    return http.post(f"{module}/{question}", json=({} if question == "circuits" else {"query": QUERY}) | fields)


@pytest.mark.parametrize(("question", "fields", "field"), SILENT)
def test_a_field_without_effect_is_refused_by_name(http, module, question, fields, field):
    answer = asked(http, module, question, fields)
    assert (answer.status_code, answer.json().get("param")) == (422, field), answer.text


@pytest.mark.parametrize(("question", "fields"), HEARD)
def test_the_same_field_is_taken_where_it_has_one(http, module, question, fields):
    name = next(reversed(fields))
    answers = [asked(http, module, question, each) for each in (fields, {k: v for k, v in fields.items() if k != name})]
    assert [each.status_code for each in answers] == [200, 200], [each.text for each in answers]
    told, without = ({name: value for name, value in each.json().items() if name != "ran"} for each in answers)
    assert told != without
