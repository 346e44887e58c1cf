"""What keys receive, pairs and corrected weights of models: those of loops over the weights of each text alone."""

import numpy as np
import pytest
from tests.models.small_models import loaded
from tests.weight_loops import corrected, of_pairs, received

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import ModelWeightsRequest
from attention_contract.validation import validate
from attention_service.models.answers.divided_questions import divided, may_divide
from attention_service.models.answers.joined_questions import group_of, joined_replies
from attention_service.models.answers.model_weights import recorded_weights, weights_reply
from attention_service.models.costs.answer_parts import at_once
from attention_service.models.loaded.checked_request import read_request

TEXTS = [[3, 4, 5, 6], [8, 3, 7, 9, 10, 3, 4], [6, 5, 7, 8, 4]]
PAIRS = [[[3, 0], [2, 2]], [[6, 1], [6, 3], [1, 5]], [[4, 0]]]
CANDIDATES = [[0, 2], [1, 3, 5], [0, 4]]
FIELDS = {"statistics": ["received", "pairs"]}
FAMILIES = ["llama", "gemma2", "bert", "gpt_oss"]


def asked(model, **fields):
    request = validate(ModelWeightsRequest, FIELDS | fields)
    return request, read_request(model, request)


def of_text(row, candidates=None):
    options = {"pairs": PAIRS[row]} | ({} if candidates is None else {"candidates": candidates[row]})
    return {"tokens": TEXTS[row], "statistic_options": options}


def check(statistics, row, expected, visible, candidates):
    """Compare the statistics of one text with loops; ``expected``: weights ``[H, L, L]``."""
    for head, weights in enumerate(expected):
        np.testing.assert_allclose(statistics["received"][head], received(weights, visible), atol=1e-5)
        for name, value in of_pairs(weights, PAIRS[row], candidates and candidates[row]).items():
            np.testing.assert_allclose(statistics["pairs"][name][head], value, atol=1e-5, err_msg=name)


def at(statistics, row, tokens):
    """The statistics of one text of several."""
    return {
        "received": np.asarray(statistics.received)[row][:, tokens],
        "pairs": {name: np.asarray(x)[row] for name, x in statistics.pairs.items()},
    }


def tokens_of(model, row):
    longest, own = max(map(len, TEXTS)), len(TEXTS[row])
    return slice(longest - own, longest) if model.reader.pads_left else slice(0, own)


@pytest.mark.sampled
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("normalize", [None, "apc"])
@pytest.mark.parametrize("candidates", [None, CANDIDATES])
def test_texts_alone_together_in_parts_and_in_one_pass_with_others_have_the_numbers_of_loops(
    family, normalize, candidates
):
    model = loaded(family)
    alone = [weights_reply(model, *asked(model, tokens=text, statistics=[])) for text in TEXTS]
    questions = [asked(model, **of_text(row, candidates), normalize=normalize) for row in range(3)]
    options = {"pairs": PAIRS} | ({} if candidates is None else {"candidates": candidates})
    both = asked(model, tokens=TEXTS, statistic_options=options, normalize=normalize)
    together, joined = weights_reply(model, *both), joined_replies(model, questions)
    assert len({group_of(model, *each) for each in questions} - {None}) == 1
    assert may_divide(model, *both)
    parts = at_once(divided(model, *both, 2, recorded_weights))
    for row, question in enumerate(questions):
        own = weights_reply(model, *question)
        for place, layer in enumerate(alone[row].layers):
            expected = np.asarray(layer.weights, np.float64)
            visible = np.ones(expected.shape[1:], bool) if family == "bert" else np.tril(expected[0] > 0)  # windows too
            if family == "llama":
                assert (visible == np.tril(np.ones_like(visible))).all()
            if normalize is not None:
                expected, visible = np.stack([corrected(each) for each in expected]), np.ones_like(visible)
            for reply in (own, joined[row]):
                found = reply.layers[place]
                np.testing.assert_allclose(found.weights, expected, atol=1e-5)
                check({"received": found.statistics.received, "pairs": found.statistics.pairs}, row, expected, visible,
                      candidates)  # fmt: skip
            for reply in (together, parts):
                statistics, tokens = reply.layers[place].statistics, tokens_of(model, row)
                check(at(statistics, row, tokens), row, expected, visible, candidates)
                padding = np.delete(np.asarray(statistics.received)[row], tokens, 1)
                assert np.isnan(padding).all()


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_layers_of_two_texts_have_pairs_of_a_token_and_one_that_it_reads(family):
    model = loaded(family)
    fields = {"tokens": TEXTS[1], "target": "the mat sat", "layers": ["cross.0"]}
    plain = np.asarray(weights_reply(model, *asked(model, **fields, statistics=[])).layers[0].weights, np.float64)
    last = plain.shape[2] - 1, plain.shape[1] - 1
    pairs = [[last[1], last[0]], [0, 1]]
    found = weights_reply(model, *asked(model, **fields, statistic_options={"pairs": pairs})).layers[0].statistics
    np.testing.assert_allclose(found.received, plain.mean(1), atol=1e-5)
    np.testing.assert_allclose(found.pairs["share"], np.mean([plain[:, q, k] for q, k in pairs], 0), atol=1e-5)
    first = np.mean([plain[:, q].argmax(-1) == k for q, k in pairs], 0)
    np.testing.assert_allclose(found.pairs["first"], first, atol=1e-6)
    assert np.isnan(found.pairs["both_share"]).all()
    for wrong, param in (
        ({"statistic_options": {"pairs": [[plain.shape[1], 0]]}}, "statistic_options.pairs.0.0"),
        ({"normalize": "apc", "statistics": ["received"]}, "normalize"),
    ):
        with pytest.raises(InvalidRequest) as fault:
            weights_reply(model, *asked(model, **fields | wrong))
        assert fault.value.param == param
        assert "cross.0" in fault.value.detail


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"pairs": PAIRS[:2]}, "statistic_options.pairs"),
        ({"pairs": [*PAIRS[:2], [[5, 0]]]}, "statistic_options.pairs.2.0.0"),  # of five tokens; padding is none
        ({"pairs": PAIRS, "candidates": CANDIDATES[:2]}, "statistic_options.candidates"),
        ({"pairs": PAIRS, "candidates": [[0], [0], [5]]}, "statistic_options.candidates.2.0"),
        ({}, "statistic_options.pairs"),
    ],
)
def test_pairs_that_no_text_has_are_refused(options, param):
    model = loaded("llama")
    with pytest.raises(InvalidRequest) as fault:
        weights_reply(model, *asked(model, tokens=TEXTS, statistics=["pairs"], statistic_options=options))
    assert fault.value.param == param
