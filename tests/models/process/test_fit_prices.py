"""The price of a fit is what admission takes for it, and covers what the fit really takes."""

import tracemalloc
from functools import partial

import numpy as np
import pytest
from tests.client.tiny_models import tokenizer
from tests.cost.peaks import peaks
from tests.models.process.test_prices import admitted, first_work, model
from tests.models.small_models import device
from tools.models_walk.model_types import built

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.lenses import JacobianRequest
from attention_contract.schemas.analyses.probes import FeaturesRequest, FitProbe
from attention_contract.schemas.analyses.vectors import StatesRequest
from attention_contract.schemas.costs.model_complexity import ModelComplexityRequest
from attention_contract.validation import validate
from attention_service.models.answers.lenses.jacobian_rows import jacobian_rows, plan_rows
from attention_service.models.answers.probes.fit_costs import features_stage, states_stage
from attention_service.models.answers.probes.text_states import plan_states, states_reply
from attention_service.models.answers.probes.token_features import features_reply, plan_features
from attention_service.models.fit_memory import lens_bytes, vector_bytes
from attention_service.models.generation.decoding.decoder import Decoder
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.process.priced_questions import AskedModel
from attention_service.models.process.served import PricedRun
from attention_service.models.server.probe_samples import LabelledSamples, ProbedFeature
from attention_service.models.server.vector_service import _components

TEXT = "the cat sat on the mat"
WORDS, TEXTS = len(TEXT.split()), 4
KINDS = ("llama", "gpt2", "bert", "t5", "deepseek_v3", "gpt_oss", "bloom", "mamba2", "qwen3_next", "llava", "vit")
POINTS = ("hidden", "output", "mlp", "router", "q", "k", "v", "context")
FEATURES = {point: {"point": point, "layer": "all"} for point in POINTS} | {
    "statistics": {"statistics": ["entropy", "first_key"]},
    "statistics of a head": {"statistics": ["entropy"], "heads": [0]},
}
LONG = 510


def told(asked, **fields):
    work = first_work(asked, "complexity", {"length": WORDS, "batch": TEXTS} | fields)
    while isinstance(work, PricedRun):
        work = work.run()
    return work.reply


def asked_model(kind):
    own = kind in {"t5", "gpt_oss"}
    made = LoadedModel(kind, built(kind).requires_grad_(False), tokenizer(), device()) if own else model(kind)
    return AskedModel(made, Decoder(made))


def refuses_alike(asked, refusal, **fit):
    """The price is refused as the fit is, by the field within the one that asks for the price."""
    (name,) = fit
    with pytest.raises(InvalidRequest) as fault:
        told(asked, **fit)
    of_text = refusal.param in {"text", "answer"}
    assert fault.value.param == (name if of_text else f"{name}.{refusal.param}")
    assert fault.value.detail.partition(": ")[2] == refusal.detail.partition(": ")[2]


@pytest.mark.sampled(kind=3, feature=3)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_fit_of_a_probe_is_told_as_it_is_admitted(kind, feature):
    """What the server holds is by the widths of features that a question really returns."""
    asked, of, positions = asked_model(kind), FEATURES[feature], [0, 2]
    question = {"of": of, "text": TEXT, "positions": positions}
    try:
        need = admitted(asked, "features", question)
    except InvalidRequest as refusal:
        refuses_alike(asked, refusal, probe={"of": of})
        return
    features = first_work(asked, "features", question).run().reply.features
    labelled = {"texts": [TEXT] * TEXTS, "labels": [[0, 1]] * TEXTS, "positions": [positions] * TEXTS}
    fit = validate(FitProbe, {"of": of} | labelled)
    held = LabelledSamples(fit, ProbedFeature(fit.of)).needed_bytes(features)
    price = told(asked, probe={"of": of, "samples": 2}).probe
    assert price.peak_bytes == need + held
    assert price.flops == TEXTS * told(asked, probe={"of": of}, batch=1).probe.flops > 0


@pytest.mark.sampled(kind=3, fields=1)
@pytest.mark.parametrize("fields", [{}, {"layers": [0], "method": "pca"}], ids=["all layers", "one layer"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_fit_of_a_vector_is_told_as_it_is_admitted(kind, fields):
    asked = asked_model(kind)
    layers = {name: value for name, value in fields.items() if name == "layers"}
    try:
        need = admitted(asked, "states", {"text": TEXT} | layers)
    except InvalidRequest as refusal:
        refuses_alike(asked, refusal, vector=fields)
        return
    states = first_work(asked, "states", {"text": TEXT} | layers).run().reply.states
    pairs = TEXTS // 2 if "method" in fields else 0
    held = vector_bytes(pairs, len(states), len(next(iter(states.values()))))
    assert told(asked, vector=fields).vector.peak_bytes == need + held


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_states_of_an_answer_take_no_more_than_those_of_a_text(kind):
    """No pass makes the logits of an answer whose states alone are wanted."""
    asked, whole = asked_model(kind), {"text": TEXT}
    parted = {"text": "the cat sat", "answer": " on the mat", "position": "answer"}
    assert admitted(asked, "states", parted) == admitted(asked, "states", whole)


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "qwen3_next"])
def test_the_fit_of_a_lens_is_told_as_it_is_admitted(kind):
    asked = asked_model(kind)
    asked.stream()  # of short texts, once for a model
    question = {"text": TEXT, "skip_first": 0, "max_tokens": 64, "start": 0}
    need = admitted(asked, "jacobian", question)
    reply = first_work(asked, "jacobian", question).run().reply
    assert told(asked, fit=True).fit.peak_bytes == need + lens_bytes(reply.rows.shape[0], reply.width)


def test_a_model_without_next_tokens_has_no_price_of_a_lens():
    with pytest.raises(InvalidRequest) as fault:
        told(asked_model("bert"), fit=True)
    assert fault.value.param == "fit"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"probe": {"of": {"point": "hidden", "layer": 99}}}, "probe.of.layer"),
        ({"probe": {"of": {"statistics": ["entropy"], "heads": [9]}}}, "probe.of.heads"),
        ({"probe": {"of": {"statistics": ["sink_mass"]}}}, "probe.of.statistics.0"),
        ({"vector": {"layers": [0, 99]}}, "vector.layers.1"),
        ({"vector": {}, "length": 65}, "length"),
        ({"probe": {"of": FEATURES["hidden"]}, "length": 65}, "length"),
    ],
)
def test_a_price_that_is_refused_names_the_field(fields, param):
    with pytest.raises(InvalidRequest) as fault:
        told(asked_model("llama"), **fields)
    assert fault.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"vector": {"method": "pca"}, "batch": 3}, "batch"),
        ({"vector": {}, "images": [{"width": 8, "height": 8}]}, "images"),
        ({"fit": True, "images": [{"width": 8, "height": 8}]}, "images"),
        ({"probe": {"of": FEATURES["q"]}, "text": TEXT}, "probe"),
        ({"probe": {"of": FEATURES["q"], "samples": 0}}, "probe.samples"),
    ],
)
def test_fields_that_contradict_are_refused(fields, param):
    with pytest.raises(InvalidRequest) as fault:
        validate(ModelComplexityRequest, fields)
    assert fault.value.param == param


def test_counts_beyond_64_bits_are_refused_also_of_a_fit():
    """Those of the passes fit, and those of the samples do not."""
    asked, of, most = asked_model("llama"), {"statistics": ["entropy"] * 64}, {"batch": 2**31 - 1}
    assert told(asked, probe={"of": of}, **most).probe.peak_bytes > 2**31
    with pytest.raises(InvalidRequest, match="64 bits") as fault:
        told(asked, probe={"of": of, "samples": 2**20}, **most)
    assert fault.value.param == "batch"


# ── what a fit really takes ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def long_model():
    made = LoadedModel(
        "llama", built("llama", max_position_embeddings=1024).requires_grad_(False), tokenizer(), device()
    )
    return AskedModel(made, Decoder(made))


@pytest.mark.parametrize("question", ["hidden", "q", "statistics", "states", "rows of a lens"])
def test_the_memory_of_a_question_holds_what_its_pass_allocates(long_model, question):
    loaded, costs, text = long_model.loaded, long_model.costs, " ".join(["the", "cat", "sat"] * (LONG // 3))
    if question == "states":
        plan = plan_states(loaded, StatesRequest(text=text))
        need, run = states_stage(costs.memory, plan).peak_bytes, partial(states_reply, loaded, plan)
    elif question == "rows of a lens":
        asked = JacobianRequest(text=text, skip_first=0, max_tokens=128, start=0)
        plan = plan_rows(loaded, asked, long_model.stream(), costs, 2**34)
        need = costs.memory.jacobian_bytes(len(plan.rows), plan.stack.length)
        run = partial(jacobian_rows, loaded, plan, long_model.stream())
    else:
        plan = plan_features(loaded, validate(FeaturesRequest, {"of": FEATURES[question], "text": text}))
        need, run = features_stage(costs.memory, plan).peak_bytes, partial(features_reply, loaded, plan)
    (held,) = peaks([run])
    assert held < need < 2 * held + 2**26


def traced(work, *size):
    """The most bytes that Python and numpy hold in some work, behind what the first fit imports."""
    work(*([20] * len(size)))
    tracemalloc.start()
    try:
        work(*size)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.long
@pytest.mark.parametrize(("texts", "rows", "layers", "width"), [(20, 500, 1, 1), (600, 1, 1, 1), (20, 200, 2, 32)])
def test_the_memory_of_samples_holds_what_a_fit_allocates(texts, rows, layers, width):
    rng, need = np.random.default_rng(0), 0

    def fit(texts, rows):
        nonlocal need
        labelled = {"texts": ["a b"] * texts, "labels": [[0] * rows, [1] * rows] * (texts // 2), "positions": "all"}
        found = validate(FitProbe, {"of": FEATURES["hidden"]} | labelled)
        samples = LabelledSamples(found, ProbedFeature(found.of))
        for number in range(texts):
            features = {str(at): rng.normal(size=(rows, width)).astype(np.float32) for at in range(layers)}
            need = samples.needed_bytes(features)
            samples.add(number, features)
        for name in samples.names:
            samples.fitted(name)

    held = traced(fit, texts, rows)
    assert held - 2**17 < need < 2 * held  # the fit's own objects take 100 kB


@pytest.mark.parametrize(("pairs", "width"), [(4000, 1), (2000, 32), (300, 400)])
def test_the_memory_of_pairs_holds_what_their_components_take(pairs, width):
    rng, layers = np.random.default_rng(0), 2

    def fit(count):
        _components({str(at): rng.normal(size=(count, width)).astype(np.float32) for at in range(layers)})

    held = traced(fit, pairs)
    assert held < vector_bytes(pairs, layers, width) < 2 * held
