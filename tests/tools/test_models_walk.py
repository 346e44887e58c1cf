"""The walk finds what it says: types that are whole, and types that are refused; the page has what it found."""

import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from tools.models_walk.compared import limited, younger
from tools.models_walk.differences import CLOSE, error
from tools.models_walk.found import Found
from tools.models_walk.joined import BOUND
from tools.models_walk.kept_walk import KeptWalk, walk
from tools.models_walk.model_types import prepare
from tools.models_walk.questions import QUESTIONS
from tools.models_walk.small_configs import SMALL, shrunk
from tools.models_walk.table_page import PAGE, page, rows, summary
from transformers.models.auto import modeling_auto

FEW = {
    "bailing_hybrid": "layers with a running state, whose passes took a second before its config was made small",
    "deepseek_v4": "masks that the model itself extends by keys of compressed tokens",
    "gemma4_text": "layers with configs of their own",
    "qwen2_moe": "a window of no tokens, which no layer uses",
    "qwen3_next": "softmax attention between linear layers",
    "t5gemma": "a decoder that begins as its generation config says",
}
"""Types that needed something that no other test of whole models has."""
QUICK = {
    "llama": "the plainest decoder",
    "gpt2": "projections that are convolutions, with biases",
    "gemma2": "norms behind each part, a cap of logits and of scores, windows",
    "gpt_neox": "attention and MLP side by side",
    "gpt_oss": "sinks and experts",
    "deepseek_v3": "multi-head latent attention",
    "qwen3_next": "softmax attention between linear layers",
    "mamba2": "a running state alone",
    "bloom": "an attention that is observed",
    "bert": "an encoder that predicts hidden tokens",
    "t5": "an encoder and a decoder",
    "clip_text_model": "no prediction head",
}
"""Types of which the younger questions are asked, by what each has."""
OFTEN = {"gemma2", "mamba2", "t5"}
"""A decoder with most of its ways at once, one whose state runs, and a pair. `tests/models/answers` asks the others'
kinds of layers each question; `make test-all` asks each type all of them."""


@pytest.fixture(scope="module", autouse=True)
def quiet():
    prepare()


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", [kind if kind == "t5gemma" else pytest.param(kind, marks=pytest.mark.slow) for kind in FEW]
)
def test_a_type_with_its_own_ways_is_whole(kind):
    found = limited(kind)
    assert found.equal, found
    assert found.weights is None or found.weights < CLOSE
    assert found.gradients < CLOSE
    assert found.invariants < CLOSE
    assert found.generated
    assert found.joined is not None
    assert found.apart is None or found.apart <= BOUND
    assert found.asked.keys() | found.refused.keys() == QUESTIONS.keys()
    assert max(found.asked.values()) < CLOSE
    assert not [reason for reason in found.reasons.values() if reason.startswith("fault")]


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", [kind if kind in OFTEN else pytest.param(kind, marks=pytest.mark.slow) for kind in QUICK]
)
def test_the_younger_questions_to_a_type_hold_their_properties(kind):
    check_younger(younger(kind))


def check_younger(found):
    """Each question is answered with the numbers of separate passes, or refused, as the page says."""
    assert found.asked.keys() | found.refused.keys() == QUESTIONS.keys(), found.reasons
    assert max(found.asked.values()) < CLOSE, found.asked
    _, *cells = rows("### The younger questions by type")[found.kind]
    refused = {name for name, cell in zip(QUESTIONS, cells, strict=True) if cell.startswith("refused")}
    assert refused == found.refused.keys(), found.refused


@pytest.mark.slow
def test_a_type_with_a_generation_of_its_own_generates():
    assert limited("seamless_m4t").generated


@pytest.mark.long
@pytest.mark.sampled(kind=1)
@pytest.mark.parametrize("kind", ["git", "bloom", "xlnet", "led"])
def test_a_type_whose_attention_is_its_own_is_observed(kind):
    found = limited(kind)
    assert found.equal, found
    assert found.way == "observed"
    assert found.weights < CLOSE
    assert found.gradients < CLOSE
    assert found.invariants < CLOSE
    assert found.generated


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", ["mamba2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("mamba", "falcon_mamba", "rwkv"))]
)
def test_a_type_without_attention_is_whole(kind):
    found = limited(kind)
    assert found.equal, found
    assert (found.layers, found.way) == (0, "–")
    assert max(found.gradients, found.invariants) < CLOSE
    assert found.implicit <= 1e-10
    assert found.generated


@pytest.mark.sampled(kind=2)
@pytest.mark.parametrize(
    ("kind", "way"),
    [("wavlm", "observed"), ("sam_vision_model", "observed"), ("swinv2", "observed"), ("swin", "computed")],
)
def test_a_type_that_hears_or_attends_within_windows_is_whole(kind, way):
    found = limited(kind)
    assert found.equal, found
    assert found.way == way
    assert found.weights < CLOSE
    assert found.invariants < CLOSE


def test_a_pair_of_encoders_is_compared_as_a_pair():
    found = limited("clip")
    assert found.equal, found
    assert (found.architecture, found.layers) == ("CLIPModel", 4)
    assert found.weights < CLOSE
    assert found.invariants < CLOSE


def test_a_type_without_weights_over_pairs_is_refused():
    assert "passes no attention" in limited("fnet").reasons["whole"]


def test_a_config_keeps_a_layer_of_each_kind():
    kinds = ["a", "a", "a", "b"]
    entries = {"num_hidden_layers": 4, "layer_types": kinds, "hidden_size": 768, "eos_token_id": 50_256}
    assert shrunk(entries) == {"num_hidden_layers": 2, "layer_types": ["a", "b"], "hidden_size": 32, "eos_token_id": 2}
    assert SMALL["hidden_size"] == 32


def test_errors_are_shares_of_the_largest_number():
    assert error([1.0, 2.5], [1.0, 2.0]) == 0.25
    assert error([float("nan")], [1.0]) == float("inf")
    with pytest.raises(ValueError, match="shapes"):
        error([1.0], [1.0, 2.0])


def counted(kind, device):
    """Find a type whole, unless its name says otherwise; runs in a process."""
    if kind == "killer":
        os._exit(1)
    return Found(kind, "Net", whole=0.0 if kind != "odd" else None, way="computed", reasons={"whole": kind})


def test_a_walk_goes_on_where_it_was_interrupted(tmp_path, capsys):
    file = tmp_path / "walk.jsonl"
    first = KeptWalk(file, "cpu", resumes=False, code="a")
    walk(["net", "odd"], first, 2, counted, ThreadPoolExecutor)
    found = walk(["net", "odd", "other"], KeptWalk(file, "cpu", resumes=True, code="a"), 2, counted, ThreadPoolExecutor)
    assert [each.kind for each in found] == ["net", "odd", "other"]
    assert [each.equal for each in found] == [True, False, True]
    assert capsys.readouterr().out.count("Found(kind='net'") == 1
    assert summary(found) == "2 of 3 types whole, 0 of them observed"
    assert KeptWalk(file, "cpu", resumes=True, code="a").found.keys() == {"net", "odd", "other"}
    with file.open("a") as cut:  # a line that was not written to its end
        cut.write('{"kind": "half')
    assert len(KeptWalk(file, "cpu", resumes=True, code="a").found) == 3
    assert not KeptWalk(file, "cpu", resumes=True, code="b").found
    assert "begins anew" in capsys.readouterr().out


@pytest.mark.slow
def test_a_type_that_ends_its_process_leaves_the_others(tmp_path):
    kept = KeptWalk(tmp_path / "walk.jsonl", "cpu", resumes=False, code="a")
    found = walk(["killer", "net"], kept, 2, counted)
    assert [each.equal for each in found] == [False, True]
    assert "process ended" in found[0].reasons["whole"]


def test_the_page_says_what_was_found():
    whole = Found("net", "Net", 1e-7, 2e-7, 3e-7, True, "unlike", 5e-7, "llama", 2, 4e-7, "computed", ["classes"])
    whole.asked = {"embeddings": 1e-7, "lens": 3e-7, "context": 2.0}
    whole.refused = {
        "effects": "of: Net has no head; send another", "paths": "from: NetModel has no head", "shared": "layer 3: no",
    }  # fmt: skip
    whole.reasons = {"similarity": "fault: it fell"}
    refused = Found("other", reasons={"whole": "checkpoint: it is | odd"})
    text = page([refused, whole])
    assert "**1 model types are whole**" in text
    row = "| net | Net | computed | 2 | 1e-07 | 2e-07 | 3e-07 | equal | unlike 5e-07 | 4e-07 | – | llama | classes |"
    assert row in text
    assert r"| other | it is \| odd |" in text
    assert "| net | 1e-07 | fault | 3e-07 | refused: 1 | refused: 1 | 2e+00 | refused: 2 |" in text
    assert "| effects | 0 | 1 | 0 | 0e+00 |" in text
    assert "| context | 1 | 0 | 1 | 2e+00 |" in text
    assert "| similarity | 0 | 0 | 1 | 0e+00 |" in text
    assert "| 1 | the model has no head | effects 1, paths 1 |" in text
    assert "| 2 | layer n: no | shared 1 |" in text


def test_the_page_has_every_type_that_predicts_tokens():
    whole, others = rows("is whole") or rows("are whole**"), rows("## Types that are not whole")
    predicting = {
        *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }  # fmt: skip
    assert predicting <= whole.keys() | others.keys()
    assert not whole.keys() & others.keys()
    assert f"**{len(whole)} model types are whole**" in PAGE.read_text("utf-8")
    assert len(whole) >= 350
    assert sum(row[8].startswith("unlike") for row in whole.values()) >= 105
    faults = re.findall(r"^\| ([\w ]+) \| \d+ \| \d+ \| (\d+) \| \S+ \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert dict(faults) == dict.fromkeys(QUESTIONS, "0")
    assert all(float(row[10]) <= 1e-10 for row in whole.values() if row[10] != "–")
    assert all(float(number) < CLOSE for row in whole.values() for number in (*row[4:6], row[9]) if number != "–")


@pytest.mark.slow
@pytest.mark.parametrize("kind", rows("are whole**") if PAGE.exists() else [])
def test_each_type_is_as_the_page_says(kind):
    found = limited(kind)
    assert found.equal, found
    _, _, way, layers, _, weights, _, tokens, joined, invariants, implicit, family, _ = rows("are whole**")[kind]
    assert found.way == way
    assert str(found.layers) == layers
    assert (found.weights is None) == (weights == "–")
    assert (found.invariants is None) == (invariants == "–")
    assert (found.invariants or 0) < CLOSE
    assert (found.implicit is None) == (implicit == "–")
    assert (found.implicit or 0) <= 1e-10
    assert {None: "–", True: "equal", False: "differ"}[found.generated] == tokens
    assert (found.joined or "–") == joined.partition(" ")[0]
    assert (found.apart or 0) <= BOUND
    assert (found.family or "–") == family
    if found.asked or found.refused:
        check_younger(found)
