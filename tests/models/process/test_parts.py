"""Every operation in parts: none takes more than a pass or two before others have their turns."""

import json
from collections import Counter
from collections.abc import Generator
from functools import cache

import pytest
from tests.client.tiny_models import tokenizer
from tests.models.small_models import device
from tools.models_walk.model_types import built

from attention_service.models.answers import model_gradients
from attention_service.models.costs.answer_parts import at_once
from attention_service.models.generation.decoding.decoder import Decoder
from attention_service.models.generation.generation import RunningGeneration
from attention_service.models.generation.generation_turns import decode, read_prompts
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.module_hooks import before
from attention_service.models.passes.points import EMBEDDINGS
from attention_service.models.process.model_operations import OPERATIONS, prepare
from attention_service.models.process.priced_questions import AskedModel
from attention_service.models.process.served import Answer, PricedRun

FACTS = {"free_bytes": 2**40, "reader": "", "form": "application/json", "encoding": "list"}
PROMPT = "the cat sat on\nthe dog on mat cat sat\nthe mat"
ANSWER = "\nthe dog sat\non the mat\nthe cat"
TEXTS = ["the cat sat on the mat " * 20] * 40
MOST = {"complete": 12}
"""The passes of a part, where it is not 2: eight prompts, or a token for those texts that are not yet joined."""
REQUESTS = {
    "forward": {"text": PROMPT},
    "weights": {"text": PROMPT, "layers": "all"},
    "gradients": {"text": PROMPT, "integrated": 256, "check": True, "wrt": ["tokens", "hidden", "weights"]},
    "effects": {"text": PROMPT, "sweep": {"tap": "weights", "over": ["layers", "heads", "keys"], "set": 0}},
    "complexity": {"length": 100, "new_tokens": 8, "lens": ["hidden"], "fit": True},
    "complete": {"model": "llama", "prompt": [PROMPT] * 30, "max_tokens": 0, "echo": True, "logprobs": 1},
    "embed": {"model": "llama", "input": TEXTS},
    "similarity": {"pairs": [[text, "the mat"] for text in TEXTS]},
    "context": {
        "text": PROMPT, "answer": ANSWER, "return": ["attention", "gradient", "hidden", "removed", "lookback"],
    },
    "lens": {"text": PROMPT, "of": ["hidden", "output", "heads"], "top_k": 3, "targets": ["cat"]},
    "jacobian": {"text": " ".join(TEXTS[:10]), "start": 0, "skip_first": 1, "max_tokens": 400},
    "features": {"text": " ".join(TEXTS[:10]), "of": {"point": "hidden", "layer": "all"}, "positions": "all"},
    "states": {"text": " ".join(TEXTS[:10]), "position": "mean"},
    "tokenize": {"model": "llama", "prompt": " ".join(TEXTS)},
}  # fmt: skip
VARIANTS = {
    "paths": ("effects", {
        "text": PROMPT, "from": {"parts": ["heads", "mlps"], "text": PROMPT.replace("cat", "dog")},
        "to": {"parts": ["q", "k", "v", "mlps"]},
    }),
    "many prompts": ("complete", {"model": "llama", "prompt": [PROMPT] * 30, "max_tokens": 2}),
    "an answer": ("gradients", {"text": PROMPT, "answer": ANSWER, "integrated": 50}),
    "many texts": ("forward", {"text": TEXTS}),
    "the weights of many texts": ("weights", {"text": TEXTS, "return_weights": False}),
}  # fmt: skip
CASES = {name: (name, fields) for name, fields in REQUESTS.items()} | VARIANTS
NOT_RUN = {
    "chat": "generates as complete does", "respond": "generates as complete does", "transcribe": "generates, too",
    "rerank": "tests/models/answers/embeddings/test_pair_scores.py",
    "score": "tests/models/answers/embeddings/test_pair_scores.py",
    "adapt": "reads a file", "forget": "runs nothing",
}  # fmt: skip


@cache
def loaded():
    words = tokenizer()
    words.model_max_length = 2048
    model = built("llama", max_position_embeddings=2048).requires_grad_(False)
    return LoadedModel("llama", model, words, device())


class Passes:
    """The passes through the layer that had the most, and the largest of them, since the last part."""

    def __init__(self, model):
        self.calls, self.tokens, self.parts = Counter(), [], []
        for layer in {place.layer for place in model.all_places}:
            before(layer, lambda state, layer=layer: self.called(layer, state))

    def called(self, layer, state):
        self.calls[layer] += 1
        self.tokens.append(state.shape[:2])

    def end_part(self):
        self.parts.append((max(self.calls.values(), default=0), [*self.tokens]))
        self.calls.clear()
        self.tokens.clear()


def parts_of(asked, passes, operation, fields):
    """The parts of an operation, run to its end."""
    body = memoryview(json.dumps(fields).encode())
    work = prepare(asked, operation, body, FACTS, lambda _: None)
    passes.end_part()
    while isinstance(work, PricedRun):
        work = work.run()
        if isinstance(work, Generator):
            work = drained(work, passes)
        elif isinstance(work, RunningGeneration):
            while not work.has_ended:
                assert not read_prompts(asked.decoder, [work], 512)
                passes.end_part()
                assert not decode(asked.decoder, [work])
                passes.end_part()
            work = Answer(last=work.end().last)
        passes.end_part()
    assert isinstance(work, Answer)


def drained(parts, passes):
    while True:
        try:
            seconds = next(parts)
        except StopIteration as end:
            return end.value
        assert seconds >= 0
        passes.end_part()


def test_every_operation_is_tried():
    assert {*REQUESTS} | {*NOT_RUN} == {*OPERATIONS}


@pytest.mark.long
@pytest.mark.sampled(case=9)
@pytest.mark.parametrize("case", CASES)
def test_no_part_takes_more_than_a_pass_or_two(case):
    operation, fields = CASES[case]
    asked = AskedModel(loaded(), Decoder(loaded()))
    for layer in range(loaded().shared_layers.count):  # short runs, once for a model
        assert loaded().begins_at(layer)
    assert loaded().runner.refuses(EMBEDDINGS, "edit") is None
    assert loaded().runner.refuses((0, "mlp"), "read") is None
    assert loaded().last_states
    if operation in {"lens", "jacobian", "complexity"} or case == "paths":
        asked.stream()  # of short texts, once for a model
    parts_of(asked, passes := Passes(loaded()), operation, fields)
    assert max(count for count, _ in passes.parts) <= MOST.get(operation, 2)
    texts, length = max(
        (shape for _, shapes in passes.parts for shape in shapes), key=lambda shape: shape.numel(), default=(1, 1)
    )
    assert texts == 1 or texts * length <= 2048


def test_a_trial_for_a_norm_of_each_head_is_a_part_of_its_own(monkeypatch):
    monkeypatch.setattr(model_gradients, "may_be_normed", lambda _: True)
    model = LoadedModel("hybrid", built("qwen3_next").requires_grad_(False), tokenizer(), device())
    asked, passes = AskedModel(model, Decoder(model)), Passes(model)
    fields = {"text": PROMPT, "of": {"token": "cat"}, "layers": [next(iter(model.implicit.values())).key]}
    parts_of(asked, passes, "gradients", fields)
    assert max(count for count, _ in passes.parts) == 2
    passes.parts.clear()
    parts_of(asked, passes, "gradients", fields)
    assert sum(count for count, _ in passes.parts) == 1, "the model is tried once, and not at each request"
    model.close()


def test_the_model_is_left_as_it_was_between_any_two_parts():
    """Another question between the parts of one gets the numbers that it gets alone."""
    model = loaded()
    served = AskedModel(model, Decoder(model))
    served.stream()
    request = memoryview(b'{"text": "the dog sat", "wrt": ["tokens"], "of": {"token": "cat"}}')

    def asked():
        work = prepare(served, "gradients", request, FACTS, lambda _: None)
        return at_once(work.run()).reply.tokens.tolist()

    alone = asked()
    for name in ("gradients", "effects", "context", "lens", "paths"):
        operation, fields = CASES[name]
        fields = fields | ({"integrated": 3} if name == "gradients" else {})
        whole = prepare(served, operation, memoryview(json.dumps(fields).encode()), FACTS, None)
        for number, _ in enumerate(whole.run()):
            if number % 7 == 0:
                assert asked() == alone, name
