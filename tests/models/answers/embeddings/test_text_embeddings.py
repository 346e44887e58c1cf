"""Embeddings: hidden states of transformers itself, pooled as the checkpoint says."""

import base64
import importlib.util
import json

import numpy as np
import pytest
import torch
from tests.client.tiny_models import tokenizer
from tests.models.answers.embeddings import sentence_folders
from tests.models.answers.embeddings.sentence_folders import GENERATIONS, marked
from tests.models.small_models import device, eager
from tokenizers.processors import TemplateProcessing

from attention_contract.errors import InvalidCheckpoint, InvalidRequest
from attention_contract.schemas.openai import EmbeddingRequest
from attention_contract.validation import validate
from attention_service.models.answers.embeddings.text_embeddings import embed, plan_embedding
from attention_service.models.loaded.loaded_model import LoadedModel

TEXTS = ["the cat sat", "the dog sat on the mat", "mat"]


@pytest.fixture
def load(tmp_path):
    """Return a function that loads the folder of the test as the worker does."""
    loaded = []

    def load():
        loaded.append(LoadedModel.load(tmp_path, dtype=None, device=device().torch, progress=lambda _: None))
        return loaded[-1]

    yield load
    for each in loaded:
        each.close()


@pytest.fixture
def plain(tmp_path, load):
    """Return a function that stores a family's model in a folder without a word on embeddings, and loads it."""

    def made(family):
        eager(family).save_pretrained(tmp_path)
        tokenizer().save_pretrained(tmp_path)
        return load()

    return made


@pytest.fixture
def sentences(tmp_path, load):
    """Return a function that writes a folder of sentence-transformers, and loads it."""

    def made(family="bert", generation="new", **settings):
        sentence_folders.write(tmp_path, family, generation, **settings)
        return load()

    return made


def states(family, text):
    """Return the last hidden states of one text, or of its ids, by transformers alone."""
    model = eager(family)
    ids = tokenizer()(text)["input_ids"] if isinstance(text, str) else text
    with torch.no_grad():
        base = model.get_encoder() if model.config.is_encoder_decoder else model.base_model
        return base(input_ids=torch.tensor([ids])).last_hidden_state[0].numpy()


def vectors(loaded, **fields):
    request = validate(EmbeddingRequest, {"model": "m", "input": TEXTS} | fields)
    plan = plan_embedding(loaded, request)
    assert plan.needed_bytes(loaded) > 0
    return embed(loaded, request, plan)


def unit(vector):
    return vector / np.linalg.norm(vector)


def weighted(states, first=0):
    """The mean with weights 1, 2, 3, …; those of the first tokens are not taken."""
    weights = np.arange(1, len(states) + first + 1)[first:]
    return weights @ states / weights.sum()


POOLINGS = {
    "cls": lambda each: each[0],
    "max": lambda each: each.max(0),
    "mean": lambda each: each.mean(0),
    "mean_sqrt_len_tokens": lambda each: each.sum(0) / np.sqrt(len(each)),
    "weightedmean": weighted,
    "lasttoken": lambda each: each[-1],
}
LONG = "the cat sat on the mat the dog"


def by_transformers(family, text, modes, *, prompt="", limit=None, left_out=0):
    """The vector of a text: its states one by one, pooled as the documentation of sentence-transformers says."""
    ids = marked()(prompt + text, truncation=limit is not None, max_length=limit)["input_ids"]
    found = states(family, ids)[left_out:]
    pools = POOLINGS | {"weightedmean": lambda each: weighted(each, left_out)}
    return np.concatenate([pools[mode](found) for mode in modes])


each_generation = pytest.mark.parametrize("generation", GENERATIONS)


@pytest.mark.sampled
@each_generation
@pytest.mark.parametrize("family", ["bert", "llama"])
@pytest.mark.parametrize("modes", [*((mode,) for mode in POOLINGS), ("max", "mean")], ids=" ".join)
def test_texts_are_pooled_as_the_checkpoint_says(sentences, generation, family, modes):
    found = vectors(sentences(family, generation, modes=modes))
    for text, each in zip(TEXTS, found.data, strict=True):
        np.testing.assert_allclose(each.embedding, by_transformers(family, text, modes), atol=1e-5)
    assert found.usage.prompt_tokens == sum(len(marked()(text)["input_ids"]) for text in TEXTS)


@pytest.mark.sampled
@each_generation
@pytest.mark.parametrize("mode", ["mean", "lasttoken"])
def test_long_texts_are_cut_at_the_limit_of_the_checkpoint(sentences, generation, mode):
    loaded = sentences(generation=generation, modes=(mode,), limit=6)
    found = vectors(loaded, input=[LONG, "mat"])
    for text, each in zip([LONG, "mat"], found.data, strict=True):
        np.testing.assert_allclose(each.embedding, by_transformers("bert", text, (mode,), limit=6), atol=1e-5)
    assert found.usage.prompt_tokens == 6 + 3


PROMPTS = {"query": "the dog sat ", "passage": "mat "}


@pytest.mark.sampled
@each_generation
@pytest.mark.parametrize(
    ("fields", "prompt"), [({}, "mat "), ({"prompt_name": "query"}, "the dog sat "), ({"prompt_name": ""}, "")]
)
def test_the_prompts_of_the_checkpoint_come_before_texts(sentences, generation, fields, prompt):
    loaded = sentences(generation=generation, prompts=PROMPTS, default="passage", limit=7)
    for text, each in zip([*TEXTS, LONG], vectors(loaded, input=[*TEXTS, LONG], **fields).data, strict=True):
        expected = by_transformers("bert", text, ("mean",), prompt=prompt, limit=7)
        np.testing.assert_allclose(each.embedding, expected, atol=1e-5)
    ids = tokenizer()(TEXTS[0])["input_ids"]  # taken as they are
    np.testing.assert_allclose(vectors(loaded, input=ids).data[0].embedding, states("bert", ids).mean(0), atol=1e-5)


@each_generation
@pytest.mark.parametrize("mode", POOLINGS)
@pytest.mark.slow
def test_the_tokens_of_a_prompt_can_be_left_out(sentences, generation, mode):
    loaded = sentences(generation=generation, modes=(mode,), prompts=PROMPTS, include_prompt=False)
    for text, each in zip(TEXTS, vectors(loaded, prompt_name="query").data, strict=True):
        expected = by_transformers("bert", text, (mode,), prompt=PROMPTS["query"], left_out=4)
        np.testing.assert_allclose(each.embedding, expected, atol=1e-5)


@each_generation
def test_texts_are_written_in_lower_case_and_vectors_cut(sentences, generation):
    loaded = sentences(generation=generation, lowers=True, truncate_dim=5, normalize=True)
    (found,) = vectors(loaded, input="The CAT sat").data
    expected = unit(by_transformers("bert", "the cat sat", ("mean",)))[:5]
    np.testing.assert_allclose(found.embedding, expected, atol=1e-5)
    (found,) = vectors(loaded, input="The CAT sat", dimensions=3).data
    np.testing.assert_allclose(found.embedding, unit(expected[:3]), atol=1e-5)


def dense(inputs, outputs, activation="activation.Tanh", **more):
    sizes = {"in_features": inputs, "out_features": outputs}
    return sizes | {"bias": True, "activation_function": f"torch.nn.modules.{activation}"} | more


DENSE = [
    dense(32, 24),
    dense(24, 24, "linear.Identity", bias=False, use_residual=True),
    dense(24, 8, use_residual=True),
]


@each_generation
def test_vectors_pass_the_dense_layers_of_the_checkpoint(sentences, generation):
    loaded = sentences(generation=generation, dense=DENSE, normalize=True)
    for text, each in zip(TEXTS, vectors(loaded).data, strict=True):
        vector = by_transformers("bert", text, ("mean",))
        for config in DENSE:
            tensors = {name: x.numpy() for name, x in sentence_folders.dense_tensors(config).items()}
            made = tensors["linear.weight"] @ vector + tensors.get("linear.bias", 0)
            made = np.tanh(made) if config["activation_function"].endswith("Tanh") else made
            residual = tensors["residual.weight"] @ vector if "residual.weight" in tensors else vector
            vector = made + (residual if config.get("use_residual") else 0)
        np.testing.assert_allclose(each.embedding, unit(vector), atol=1e-5)
    with pytest.raises(InvalidRequest, match="the vectors have 8") as refusal:
        vectors(loaded, dimensions=9)
    assert refusal.value.param == "dimensions"


CHAT = (
    "{% for each in messages %}{{ each.role }} {{ each.content }} on {% endfor %}"
    "{% if add_generation_prompt %}dog{% endif %}"
)


def test_texts_are_messages_where_the_checkpoint_says_so(sentences):
    loaded = sentences("llama", modes=("lasttoken",), chat=CHAT, prompts=PROMPTS, default="query", limit=10)
    (found,) = vectors(loaded, input="the cat").data
    ids = tokenizer()("system the dog sat on user the cat on")["input_ids"]
    np.testing.assert_allclose(found.embedding, states("llama", ids)[-1], atol=1e-5)
    with pytest.raises(InvalidRequest, match="in the chat template; at most 10") as refusal:
        vectors(loaded, input=["mat", LONG])
    assert refusal.value.param == "input.1"


CASES = {
    "modes": {"modes": ("cls", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"), "normalize": True},
    "limit": {"limit": 6, "modes": ("lasttoken",)},
    "no limit": {},
    "prompts": {"prompts": PROMPTS, "default": "passage", "limit": 7},
    "prompt left out": {"prompts": PROMPTS, "default": "query", "include_prompt": False, "modes": ("weightedmean",)},
    "lower case": {"lowers": True, "truncate_dim": 5, "normalize": True},
    "dense": {"dense": DENSE, "normalize": True},
    "chat": {"chat": CHAT, "modes": ("lasttoken",), "prompts": PROMPTS, "default": "query"},
}


@pytest.mark.skipif(importlib.util.find_spec("sentence_transformers") is None, reason="it is not installed")
@each_generation
@pytest.mark.parametrize("family", ["bert", "llama"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("prompt_name", [None, "query", "document"])
def test_vectors_are_those_of_sentence_transformers(tmp_path, sentences, generation, family, case, prompt_name):
    from sentence_transformers import SentenceTransformer

    if case == "chat" and generation == "old":
        pytest.skip("it had none")
    loaded, theirs = sentences(family, generation, **CASES[case]), SentenceTransformer(str(tmp_path), device="cpu")
    texts = [*TEXTS, "The CAT sat", LONG, *([] if case == "chat" else [f"{LONG} {LONG} {LONG} {LONG} {LONG}"])]
    expected = theirs.encode(texts, prompt_name=prompt_name)
    found = vectors(loaded, input=texts, **({} if prompt_name is None else {"prompt_name": prompt_name}))
    np.testing.assert_allclose([each.embedding for each in found.data], expected, atol=1e-5)


@pytest.mark.sampled(family=1, pool=1)
@pytest.mark.parametrize(
    ("family", "pool"), [("bert", "mean"), ("t5", "mean"), ("gpt2", "lasttoken")], ids=["encoder", "pair", "decoder"]
)
def test_without_a_word_of_the_checkpoint_vectors_have_length_one(plain, family, pool):
    found = vectors(plain(family))
    for text, each in zip(TEXTS, found.data, strict=True):
        np.testing.assert_allclose(each.embedding, unit(POOLINGS[pool](states(family, text))), atol=1e-5)


def test_an_encoder_in_the_place_of_a_decoder_is_pooled_over_all_tokens(tmp_path, plain, load):
    plain("llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    assert plan_embedding(load(), validate(EmbeddingRequest, {"model": "m", "input": "mat"})).settings.modes == (
        "mean",
    )


def test_the_forms_of_a_vector(sentences):
    loaded = sentences(normalize=True)
    plain = np.array([each.embedding for each in vectors(loaded).data])
    np.testing.assert_allclose(np.linalg.norm(plain, axis=1), 1, atol=1e-6)
    packed = vectors(loaded, encoding_format="base64").data
    np.testing.assert_allclose([np.frombuffer(base64.b64decode(each.embedding), "<f4") for each in packed], plain)
    short = vectors(loaded, dimensions=4).data
    np.testing.assert_allclose([each.embedding for each in short], [unit(each[:4]) for each in plain], atol=1e-6)
    ids = marked()(TEXTS[0])["input_ids"]
    np.testing.assert_allclose(vectors(loaded, input=ids).data[0].embedding, plain[0], atol=1e-5)


@pytest.mark.parametrize("scales", [True, False], ids=["scaled", "unscaled"])
def test_normalize_says_whether_vectors_have_length_one(sentences, scales):
    loaded = sentences(normalize=scales)
    raw = np.array([by_transformers("bert", text, ["mean"]) for text in TEXTS])
    assert abs(np.linalg.norm(raw, axis=1) - 1).min() > 0.1
    whole = np.array([unit(each) for each in raw])
    expected = {
        (): whole if scales else raw,
        (("normalize", False),): raw,
        (("normalize", True),): whole,
        (("normalize", False), ("dimensions", 4)): raw[:, :4],
        (("normalize", True), ("dimensions", 4)): np.array([unit(each[:4]) for each in raw]),
    }
    for fields, values in expected.items():
        found = [each.embedding for each in vectors(loaded, **dict(fields)).data]
        np.testing.assert_allclose(found, values, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_vectors_of_a_model_without_settings_are_unscaled_too(plain, family):
    (found,) = vectors(plain(family), input="the cat sat", normalize=False).data
    own = states(family, "the cat sat")
    np.testing.assert_allclose(found.embedding, own.mean(0) if family == "bert" else own[-1], atol=1e-5)


@pytest.mark.sampled(fields=3)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"dimensions": 99}, "dimensions"),
        ({"input": [[3], [99]]}, "input.1"),
        ({"input": [[3], [3] * 99]}, "input.1"),
        ({"input": ["mat", LONG * 20]}, "input.1"),  # a folder without a limit cuts no text in silence
        ({"prompt_name": "nothing"}, "prompt_name"),
        ({"input": [3], "prompt_name": "query"}, "prompt_name"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_its_field(plain, fields, param):
    with pytest.raises(InvalidRequest) as refusal:
        vectors(plain("bert"), **fields)
    assert refusal.value.param == param


def test_a_text_that_its_prompt_leaves_no_token_of_is_refused(sentences):
    loaded = sentences(prompts=PROMPTS, default="query", include_prompt=False, limit=3)
    loaded.reader.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A")
    with pytest.raises(InvalidRequest, match="besides those of the prompt") as refusal:
        vectors(loaded, input=["cat"])
    assert refusal.value.param == "input.0"


MODULES = [
    {"type": f"sentence_transformers.models.{kind}", "path": path}
    for kind, path in (("Transformer", ""), ("Pooling", "1_Pooling"))
]
OTHER = "sentence_transformers.models.LSTM"


@pytest.mark.sampled(content=5, says=5)
@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("modules.json", {"a": 1}, "no JSON list"),
        ("modules.json", [1], "list of objects"),
        ("modules.json", [MODULES[1], MODULES[0]], "before others"),
        ("modules.json", [MODULES[0]], "before others"),
        ("modules.json", [*MODULES, {"type": OTHER}], "pass LSTM, which is not supported"),
        ("2_Dense/config.json", dense(32, 24) | {"activation_function": "os.system"}, "an activation of torch.nn"),
        ("2_Dense/config.json", dense(32, 24, "linear.Linear"), "an activation of torch.nn; got 'Linear'"),
        ("2_Dense/config.json", dense(32, 24, "activation.PReLU"), "an activation of torch.nn; got 'PReLU'"),
        ("2_Dense/config.json", dense(16, 24), "takes vectors of 16, not of 32"),
        ("2_Dense/config.json", dense(32, 20), "takes vectors of 24, not of 20"),
        ("2_Dense/config.json", dense(32, 24, bias=False), "has tensors .* its config says"),
        ("2_Dense/config.json", dense(32, 24, module_input_name="token_embeddings"), "other vectors than the pooled"),
        ("3_Dense/config.json", dense(24, 24), "has tensors .* its config says"),
        ("modules.json", [{"type": "custom_st.Transformer"}, MODULES[1]], "code of its own"),
        ("modules.json", [MODULES[0], MODULES[1] | {"path": "../.."}], "outside the checkpoint"),
        ("1_Pooling/config.json", [], "no JSON object"),
        ("1_Pooling/config.json", {"pooling_mode": "last"}, "expected a pooling_mode of cls, max.* got 'last'"),
        ("1_Pooling/config.json", {"pooling_mode": []}, "expected a pooling_mode"),
        ("1_Pooling/config.json", {"include_prompt": "no"}, "include_prompt to be of type bool"),
        ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length of 1 or more"),
        ("sentence_bert_config.json", {"max_seq_length": 1}, "cut to 1 tokens, of which 2 are special"),
        ("sentence_bert_config.json", {"max_seq_length": "7"}, "max_seq_length to be of type int"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "fill-mask"),
        ("sentence_bert_config.json", {"config_kwargs": {"is_causal": False}}, "is_causal"),
        ("sentence_bert_config.json", {"processing_kwargs": {"text": {}}}, "processing_kwargs"),
        ("sentence_bert_config.json", {"modality_config": {"image": {}}}, "modality_config"),
        ("sentence_bert_config.json", {"do_lower_case": True, "modality_config": {"message": {}}}, "do_lower_case"),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "SparseEncoder"),
        ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "none of its prompts"),
        ("config_sentence_transformers.json", {"prompts": {"x": 1}}, "not all texts"),
        ("config_sentence_transformers.json", {"truncate_dim": 0}, "truncate_dim"),
    ],
)
def test_a_folder_that_says_something_else_is_refused(sentences, tmp_path, file, content, says):
    loaded = sentences(dense=DENSE)
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(InvalidCheckpoint, match=says) as fault:
        vectors(loaded)
    assert fault.value.param == "model"
