"""Classifiers, pairs of texts, given answers and conversations over real HTTP, beside transformers."""

import httpx
import numpy as np
import pytest
import torch
from tests.client.tiny_models import tokenizer
from tests.client.transformers.families import tiny
from tests.conftest import live_server
from tests.models.answers.small_classifiers import eager, sharp, words

from attention_client import Client, InvalidRequest

pytestmark = pytest.mark.filterwarnings("ignore:os.fork")
TEXT, PAIR = "the cat sat", "the dog sat on the mat"
SCORES = (("num_labels", 1), ("id2label", None), ("label2id", None))
TEMPLATE = (
    "{% for tool in tools or [] %}the {{ tool.name }} {% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}sat {% else %}on {% endif %}{{ (message.content or '') | trim }}"
    "{% for call in message.tool_calls or [] %} mat {{ call.function.arguments.place }}{% endfor %} die "
    "{% endfor %}"
    "{% if add_generation_prompt %}sat{% if mood %} {{ mood }}{% endif %}{% endif %}"
)
"""Words in the place of marks: ``on`` begins what a user says, ``sat`` an answer, ``die`` ends both."""
CHAT = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": " the dog on the mat "}]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The address of a server with small models of texts."""
    root = tmp_path_factory.mktemp("models")
    for name, model in {
        "moods": sharp("bert", "ForSequenceClassification"),
        "ranks": sharp("bert", "ForSequenceClassification", **dict(SCORES)),
        "names": sharp("bert", "ForTokenClassification"),
        "talker": tiny("llama"),
    }.items():
        model.save_pretrained(root / name)
        written = tokenizer() if name == "talker" else words()
        written.chat_template = TEMPLATE if name == "talker" else None
        written.save_pretrained(root / name)
    with live_server(root) as address:
        yield address


@pytest.fixture(scope="module")
def models(url):
    with Client(url, timeout=120) as client:
        yield client.models


def test_the_list_tells_the_classes_before_a_model_is_loaded(url):
    listed = {each["id"]: each for each in httpx.get(f"{url}/v1/models").json()["data"]}
    assert listed["moods"]["state"] == "idle"
    assert (listed["moods"]["predicts"], listed["moods"]["classes"]) == ("class", ["bad", "so so", "good"])
    assert listed["ranks"]["classes"] == ["LABEL_0"]
    assert listed["moods"]["takes"] == ["text", "text_pair"]
    assert (listed["tiny"]["predicts"], listed["tiny"]["classes"]) == ("next", [])


def test_a_classifier_answers_with_its_classes_and_their_gradients(models):
    expected = eager("bert", "ForSequenceClassification")(**words()(TEXT, return_tensors="pt")).logits[0]
    reply = models.forward("moods", TEXT)
    assert [each.token for each in reply.predictions[0].top] == [
        ("bad", "so so", "good")[each] for each in expected.argsort(descending=True)
    ]
    info = models.get("moods")
    assert (info.predicts, info.classes) == ("class", ["bad", "so so", "good"])
    assert info.left_out == ["tokenizer (13 tokens, and the model has embeddings of 96: it may be another model's)"]
    assert info.takes == ["text", "text_pair"]
    saliency = models.gradients("moods", TEXT, of={"token": "good"})
    assert saliency.token_names == ["good"]
    assert float(saliency.value) == pytest.approx(float(expected.log_softmax(-1)[2]), abs=1e-5)
    assert len(saliency.tokens) == len(saliency.labels.tokens) == 5
    with pytest.raises(InvalidRequest) as caught:
        models.gradients("moods", TEXT, of={"token": "ugly"})
    assert caught.value.param == "of.token"
    for fields in ({"sweep": {"tap": "context", "set": 0}}, {}):
        with pytest.raises(InvalidRequest, match="predicts one class") as caught:
            (models.effects if fields else models.gradients)("moods", TEXT, of={"position": 1}, **fields)
        assert caught.value.param == "of.position"
    entities = models.forward("names", TEXT, top_k=1).predictions
    assert [each.position for each in entities] == [*range(5)]


def test_a_reranker_scores_a_question_with_each_of_several_texts(models):
    sent = words()([TEXT] * 2, [PAIR, "a mat"], padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = eager("bert", "ForSequenceClassification", SCORES)(**sent).logits[:, 0]
    reply = models.forward("ranks", TEXT, text_pair=[PAIR, "a mat"])
    scores = [each.top[0].logit for each in reply.predictions]
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert reply.labels[0].parts[1:4] == ["text"] * 3
    found = models.gradients("ranks", TEXT, text_pair=PAIR)
    assert float(found.value) == pytest.approx(scores[0], abs=1e-4)


QUERY, DOCUMENTS = TEXT, [PAIR, "a mat", "the cat sat on the mat the dog sat", "the dog"]


def logit(document, limit=None):
    """The logit of the query and a document by transformers, and the number of their tokens."""
    sent = words()(QUERY, document, truncation="longest_first" if limit else False, max_length=limit)
    with torch.no_grad():
        found = eager("bert", "ForSequenceClassification", SCORES)(
            torch.tensor([sent["input_ids"]]), token_type_ids=torch.tensor([sent["token_type_ids"]])
        )
    return float(found.logits.double()), len(sent["input_ids"])


def test_documents_are_ranked_over_http_in_the_form_of_vllm_and_jina(url):
    logits, counts = zip(*map(logit, DOCUMENTS), strict=True)
    sent = {"model": "ranks", "query": QUERY, "documents": DOCUMENTS}
    reply = httpx.post(f"{url}/v1/rerank", json=sent | {"top_n": 3}, timeout=120).json()
    assert reply.keys() == {"id", "model", "usage", "results", "ran"}
    assert (reply["id"][:7], reply["model"]) == ("rerank-", "ranks")
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["total_tokens"]) == (sum(counts), sum(counts))
    order = np.argsort(logits)[::-1].tolist()
    assert [each["index"] for each in reply["results"]] == order[:3]
    for each in reply["results"]:
        assert each.keys() == {"index", "document", "relevance_score"}
        assert each["document"] == {"text": DOCUMENTS[each["index"]]}
        assert each["relevance_score"] == pytest.approx(1 / (1 + np.exp(-logits[each["index"]])), abs=2e-5)
    raw = httpx.post(f"{url}/v1/rerank", json=sent | {"use_activation": False, "return_documents": False}).json()
    assert [each["index"] for each in raw["results"]] == order
    for each in raw["results"]:
        assert each.keys() == {"index", "relevance_score"}
        assert each["relevance_score"] == pytest.approx(logits[each["index"]], abs=1e-4)


def test_pairs_are_scored_over_http_and_long_ones_are_cut(url):
    sent = {"model": "ranks", "text_1": QUERY, "text_2": DOCUMENTS}
    for limit in (None, 9):
        reply = httpx.post(f"{url}/v1/score", json=sent | {"truncate_prompt_tokens": limit}, timeout=120).json()
        assert reply.keys() == {"id", "object", "created", "model", "data", "usage", "ran"}
        assert reply["object"] == "list"
        expected = [logit(each, limit) for each in DOCUMENTS]
        assert reply["usage"]["prompt_tokens"] == sum(count for _, count in expected)
        for at, (each, document) in enumerate(zip(reply["data"], DOCUMENTS, strict=True)):
            assert (each["index"], each["object"]) == (at, "score")
            assert each["score"] == pytest.approx(1 / (1 + np.exp(-expected[at][0])), abs=2e-5)
            assert each.get("truncated", False) == (limit is not None and logit(document)[1] > limit)
    assert any(logit(each)[1] > limit for each in DOCUMENTS)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("rerank", {"model": "moods"}, "model"),
        ("rerank", {"query": ""}, "query"),
        ("rerank", {"query": "a\x00b"}, "query"),
        ("rerank", {"documents": []}, "documents"),
        ("rerank", {"documents": ["a", ""]}, "documents.1"),
        ("rerank", {"truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
        ("score", {"text_1": ["a", "b", "c"]}, "text_2"),
        ("score", {"model": "moods"}, "model"),
    ],
)
def test_a_scoring_request_at_fault_names_its_field(url, path, fields, param):
    texts = {"query": QUERY, "documents": ["a", "b"]} if path == "rerank" else {"text_1": "a", "text_2": ["b", "c"]}
    reply = httpx.post(f"{url}/v1/{path}", json={"model": "ranks"} | texts | fields, timeout=120)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def ids_of(text):
    return tokenizer()(text)["input_ids"]


def logs_of(ids, begin):
    """ln p of each token from ``begin`` on, by transformers."""
    with torch.no_grad():
        logs = tiny("llama")(torch.tensor([ids])).logits[0].log_softmax(-1)
    return logs[range(begin - 1, len(ids) - 1), ids[begin:]]


@pytest.mark.slow
def test_a_conversation_is_written_as_the_request_says(models):
    def read(messages=CHAT[:1], **fields):
        return models.weights("talker", messages=messages, return_weights=False, **fields).labels_of().ids

    assert read() == ids_of("on the cat die sat")
    assert read(chat_template_kwargs={"mood": "cat"}) == ids_of("on the cat die sat cat")
    assert read(chat_template_kwargs={"tools": [{"name": "mat"}]}) == ids_of("the mat on the cat die sat")
    assert read(add_generation_prompt=False) == ids_of("on the cat die")
    assert read(CHAT) == ids_of("on the cat die sat the dog on the mat die")
    assert read(CHAT, add_generation_prompt=True) == ids_of("on the cat die sat the dog on the mat die sat")
    assert read(CHAT, continue_final_message=True) == ids_of("on the cat die sat the dog on the mat")
    called = {"function": {"name": "go", "arguments": '{"place": "on"}'}, "id": "1"}
    past = [
        CHAT[0], {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "content": "dog", "tool_call_id": "1"},
    ]  # fmt: skip
    assert read(past) == ids_of("on the cat die sat mat on die on dog die sat")
    found = models.chat("talker", past, max_tokens=1)
    assert found.usage.prompt_tokens == len(ids_of("on the cat die sat mat on die on dog die sat"))
    for fields, text in (
        ({"continue_final_message": True, "add_generation_prompt": False}, "on the cat die sat the dog on the mat"),
        ({"chat_template_kwargs": {"mood": "cat"}}, "on the cat die sat the dog on the mat die sat cat"),
        ({"add_generation_prompt": False}, "on the cat die sat the dog on the mat die"),
    ):
        look = {"statistics": ["entropy"]}
        reply = models.chat("talker", CHAT, max_tokens=3, temperature=0, attention=look, **fields)
        plain = models.generate("talker", ids_of(text), max_tokens=3, temperature=0, attention=look)
        assert [each.id for each in reply.choices[0].attention] == [each.id for each in plain.choices[0].attention]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ],
)
def test_variables_that_are_none_are_refused(models, fields, param):
    for ask in (models.weights, models.gradients, models.forward, models.chat):
        with pytest.raises(InvalidRequest) as caught:
            ask("talker", messages=CHAT, **fields)
        assert caught.value.param == param


def test_the_answer_of_a_conversation_has_a_log_probability_and_a_gradient(models):
    text = "on the cat die sat the dog on the mat die"
    ids = ids_of(text)
    reply = models.forward("talker", messages=CHAT)
    labels = reply.labels_of()
    assert labels.parts == [None, "user", "user", None, None, *["answer"] * 5, None]
    expected = logs_of(ids, 5)[:5]
    np.testing.assert_allclose([each.logprob for each in reply.answer], expected, atol=1e-4)
    assert [each.position for each in reply.answer] == [5, 6, 7, 8, 9]
    assert [each.token for each in reply.answer] == ["the", "dog", "on", "the", "mat"]
    found = models.gradients("talker", messages=CHAT)
    assert float(found.value) == pytest.approx(float(expected.sum()), abs=1e-4)
    np.testing.assert_allclose([each.logprob for each in found.answer], expected, atol=1e-4)
    assert float(models.gradients("talker", messages=CHAT, of={"answer": "mean"}).value) == pytest.approx(
        float(expected.mean()), abs=1e-4
    )
    last = models.gradients("talker", messages=CHAT, of={"position": -1})
    assert float(last.value) != pytest.approx(float(found.value), abs=1e-3)


def test_a_text_and_its_answers_are_one_batch(models):
    answers = [" sat on the mat", " the dog"]
    reply = models.forward("talker", "the cat", answer=answers, top_k=1)
    for answer, tokens, labels in zip(answers, reply.answer, reply.labels, strict=True):
        expected = logs_of(ids_of(f"the cat{answer}"), 2)
        np.testing.assert_allclose([each.logprob for each in tokens], expected, atol=1e-4)
        own = [span for span, part in zip(labels.spans, labels.parts, strict=True) if part == "answer"]
        assert [answer[slice(*span)] for span in own] == answer.split()
    found = models.gradients("talker", "the cat", answer=answers, wrt=["tokens", "embeddings"])
    single = models.gradients("talker", "the cat", answer=answers[1], check=True, integrated=32)
    assert float(found.value[1]) == pytest.approx(float(single.value), abs=1e-4)
    assert all(each.passed for each in single.check.values())
    table = tiny("llama")
    ids = ids_of("the cat the dog")
    embedded = table.get_input_embeddings()(torch.tensor([ids])).detach().requires_grad_()
    logs = table(inputs_embeds=embedded).logits[0].log_softmax(-1)
    logs[[1, 2], ids[2:]].sum().backward()
    np.testing.assert_allclose(found.embeddings[1][-4:], embedded.grad[0], atol=1e-4)


def test_an_answer_that_is_none_is_refused(models):
    for fields in ({"text": "the", "of": {"answer": "sum"}}, {"tokens": [3, 4], "answer": "the"}):
        with pytest.raises(InvalidRequest) as caught:
            models.gradients("talker", **fields)
        assert caught.value.param == ("of" if "of" in fields else "answer")
    with pytest.raises(InvalidRequest, match="does not predict"):
        models.gradients("moods", "the", answer="cat", of={"answer": "sum"})


def test_lm_eval_scores_continuations(url):
    """The requests of lm-eval's ``local-completions``, and what it makes of the replies."""
    tasks = [([5, 3, 7], [8, 6]), ([4, 9], [10, 3, 5])]
    request = {
        "model": "talker", "prompt": [context + rest for context, rest in tasks], "temperature": 0, "max_tokens": 1,
        "logprobs": 1, "seed": 1234, "echo": True,
    }  # fmt: skip
    reply = httpx.post(f"{url}/v1/completions", json=request, timeout=60).raise_for_status().json()
    for choice, (context, rest) in zip(sorted(reply["choices"], key=lambda each: each["index"]), tasks, strict=True):
        logprobs = choice["logprobs"]
        own = logprobs["token_logprobs"][len(context) : -1]
        tops = logprobs["top_logprobs"][len(context) : -1]
        expected = logs_of(context + rest, len(context))
        assert sum(own) == pytest.approx(float(expected.sum()), abs=1e-4)
        with torch.no_grad():
            logits = tiny("llama")(torch.tensor([context + rest])).logits[0, len(context) - 1 : -1]
        greedy = [own == max(top.values()) for own, top in zip(own, tops, strict=True)]
        assert greedy == (logits.argmax(-1) == torch.tensor(rest)).tolist()
    texts = request | {"prompt": ["the cat sat", "on the mat"]}
    choices = httpx.post(f"{url}/v1/completions", json=texts, timeout=60).raise_for_status().json()["choices"]
    assert [each["text"].startswith(text) for each, text in zip(choices, texts["prompt"], strict=True)] == [True, True]
    until = {"model": "talker", "prompt": [[5, 3, 7]], "max_tokens": 4, "temperature": 0, "stop": ["die"], "seed": 1234}
    assert httpx.post(f"{url}/v1/completions", json=until, timeout=60).raise_for_status().json()["choices"]


def vector_of(family, ids, weights):
    """The pooled states of a text, and its embeddings as a leaf of the graph."""
    model = eager("bert", "ForTokenClassification") if family == "bert" else tiny("llama")
    embedded = model.get_input_embeddings()(torch.tensor([ids])).detach().requires_grad_()
    states = model.base_model(inputs_embeds=embedded).last_hidden_state[0]
    shares = weights(len(ids))
    return (states * shares[:, None]).sum(0) / shares.sum(), embedded


@pytest.mark.parametrize(
    ("model", "family", "pooling", "weights"),
    [
        ("names", "bert", None, torch.ones),
        ("talker", "llama", None, lambda count: torch.eye(count)[-1]),
        ("talker", "llama", "mean", torch.ones),
        ("talker", "llama", "weightedmean", lambda count: torch.arange(1, count + 1).float()),
    ],
)
def test_the_similarity_of_two_texts_and_its_gradient_are_those_of_transformers(
    models, model, family, pooling, weights
):
    pairs = [["the cat sat", "the dog sat on the mat"], ["on the mat", "the cat"]]
    read = words() if family == "bert" else tokenizer()
    reply = models.similarity(model, pairs, pooling=pooling)
    for index, pair in enumerate(pairs):
        (first, one), (second, other) = (vector_of(family, read(text)["input_ids"], weights) for text in pair)
        cosine = torch.nn.functional.cosine_similarity(first, second, dim=0)
        cosine.backward()
        assert reply.similarity[index] == pytest.approx(float(cosine.detach()), abs=1e-5)
        for side, embedded in enumerate((one, other)):
            expected = (embedded.grad * embedded).sum(-1)[0].detach()
            labels, shares = reply.labels[index][side], reply.tokens[index][side]
            own = [share for token, share in zip(labels.tokens, shares, strict=True) if token != "[PAD]"]
            np.testing.assert_allclose(own, expected, atol=1e-4)
    vectors = [np.array(each.embedding) for each in models.embed(model, pairs[0], pooling=pooling).data]
    unit = [each / np.linalg.norm(each) for each in vectors]
    assert float(unit[0] @ unit[1]) == pytest.approx(reply.similarity[0], abs=1e-5)
    plain = models.similarity(model, pairs, pooling=pooling, gradients=False)
    assert plain.tokens is None
    np.testing.assert_allclose(plain.similarity, reply.similarity, atol=1e-6)


def test_a_prompt_that_a_model_does_not_have_is_named(models):
    with pytest.raises(InvalidRequest, match="has no prompt 'nothing'") as caught:
        models.similarity("names", [["the", "cat"]], prompt_names=["", "nothing"])
    assert caught.value.param == "prompt_names.1"
