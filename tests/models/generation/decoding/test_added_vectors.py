"""Edits that add, in a forward pass, in gradients and while tokens are generated: those of hooks that add."""

from functools import cache
from types import MethodType

import numpy as np
import pytest
import torch
from tests.client.tiny_models import tokenizer
from tests.models.generation.decoding.test_joined import Callers, alone, same, tokens
from tests.models.generation.decoding.test_read_texts import Server, cached, text, token_ids
from tests.models.small_models import device
from tools.models_walk.model_types import built
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest
from attention_contract.validation import validate
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.float64_runs import compute_in_float64, made_in_float64

LONG = {"max_position_embeddings": 256}
KINDS = ("gpt2", "llama", "qwen3", "mistral", "opt", "deepseek_v3")
MORE = (
    "olmo2", "mixtral", "gpt_neox", "phi", "phi3", "starcoder2", "stablelm", "cohere", "glm", "granite", "olmo",
    "qwen2", "qwen3_moe", "smollm3", "helium", "ernie4_5", "nemotron", "biogpt",
)  # fmt: skip
EVERY = [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE)]
INSIDE = ("context", "q", "k", "v", "scores")
TAPS = ("output", "mlp", "hidden", "embeddings", *INSIDE)
PROMPT = [3 + 7 * number % 83 for number in range(9)]
NEW = 24
LAYER = 1
TOLERANCE = 1e-6


def entries(kind):
    return {"n_positions": 256} if kind == "gpt2" else LONG


def made(kind, dtype):
    if dtype == torch.float32:
        return built(kind, **entries(kind)).requires_grad_(False)
    with made_in_float64():
        model = built(kind, **entries(kind)).requires_grad_(False).to(dtype)
    compute_in_float64(model)
    return model


@cache
def loaded(kind, dtype=torch.float32):
    torch.set_num_threads(1)
    model = made(kind, dtype)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return LoadedModel(kind, model, tokenizer(), device())


def key(tap):
    return "embeddings" if tap == "embeddings" else str(LAYER)


def added(kind, tap):
    """A tensor to add, by the sizes of a layer: of states by width, of others by head too, of scores one by head."""
    place, draws = loaded(kind).places[str(LAYER)], torch.Generator().manual_seed(3)
    sizes = place.widths
    config, table = loaded(kind).model.config, loaded(kind).model.get_input_embeddings()
    states = {"mlp": config.hidden_size, "hidden": config.hidden_size, "embeddings": table.embedding_dim}
    width = states | {"output": place.output_width, "v": sizes.value_dim, "context": sizes.value_dim, "scores": 1}
    shape = [1, width.get(tap, sizes.head_dim)]
    if tap in INSIDE:
        shape = [sizes.kv_heads if tap in {"k", "v"} else sizes.heads, *shape]
    return torch.randn(shape, generator=draws)


class Plain:
    """A model of transformers whose attention at one layer is added to by hooks: plain PyTorch, in whole tensors."""

    def __init__(self, kind, tap, x, first=0, dtype=torch.float32):
        given = loaded(kind)
        place = given.places[str(LAYER)]
        # These types add what their MLP makes last, so that more of it is more of the layer's output.
        sites = {"mlp": place.layer, "hidden": place.layer, "embeddings": given.model.get_input_embeddings()}
        site = sites.get(tap, place.module)
        name = next(name for name, each in given.model.named_modules() if each is site)
        self.model, self.tap, self.x, self.first, self.seen = made(kind, dtype), tap, x, first, 0
        ALL_ATTENTION_FUNCTIONS.register("added", MethodType(attend, self))
        ALL_MASK_ATTENTION_FUNCTIONS.register("added", eager_mask)
        self.model.set_attn_implementation("added")
        self.target = self.model.get_submodule(name)
        if tap not in INSIDE:
            self.target.register_forward_hook(self.hook)

    def rows(self, queries):
        """1 for the tokens of a pass that are added to, ``[queries, 1]``."""
        return (torch.arange(self.seen, self.seen + queries) >= self.first).float()[:, None]

    def hook(self, _, __, output):
        state = output[0] if isinstance(output, tuple) else output
        state = state + self.rows(state.shape[1]) * self.x
        return (state, *output[1:]) if isinstance(output, tuple) else state

    def generate(self, prompt, count):
        """Greedy tokens, each from a pass over the new tokens and the past."""
        ids, past, found = list(prompt), None, []
        with torch.no_grad():
            for _ in range(count):
                new = ids[self.seen :]
                output = self.model(input_ids=torch.tensor([new]), past_key_values=past, use_cache=True)
                past, self.seen = output.past_key_values, len(ids)
                found.append(int(output.logits[0, -1].argmax()))
                ids.append(found[-1])
        return found


def attend(self, module, query, key, value, attention_mask, scaling=None, **_):
    """Attention as its formula says it, with what is added to a tap of one layer."""
    mine = module is self.target
    queries, keys = query.shape[2], key.shape[2]
    at = torch.arange(keys) + self.seen + queries - keys  # a sliding cache has the last keys
    by_key = (at >= self.first).float()[:, None]
    if mine and self.tap == "q":
        query = query + self.rows(queries) * self.x
    if mine and self.tap == "k":
        key = key + by_key * self.x * at[:, None] / 8
    if mine and self.tap == "v":
        value = value + by_key * self.x
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if mine and self.tap == "scores":
        scores = scores + self.rows(queries) * self.x * at
    if attention_mask is not None:
        scores = scores + attention_mask[..., :keys]
    context = scores.softmax(-1) @ value
    if mine and self.tap == "context":
        context = context + self.rows(queries) * self.x
    return context.transpose(1, 2).contiguous(), None


def edit(tap, x, length=0):
    """The edit that adds x; to keys and scores, by the number of each key among this many.

    What is added to all keys alike changes no weight.
    """
    at = torch.arange(length)
    return {"tap": tap, "add": (x * at if tap == "scores" else x * at[:, None] / 8 if tap == "k" else x).numpy()}


@pytest.mark.sampled
@pytest.mark.parametrize("tap", TAPS)
@pytest.mark.parametrize("kind", EVERY)
def test_a_pass_and_its_gradients_are_those_of_a_hook_that_adds(kind, tap):
    """In float64, so that nothing but another sum could differ by more than 1e-9."""
    model, x = loaded(kind, torch.float64), added(kind, tap)
    plain = Plain(kind, tap, x, dtype=torch.float64)
    held = []
    plain.model.get_input_embeddings().register_forward_hook(
        lambda _, __, output: held.append(output.requires_grad_()) or None
    )
    logits = plain.model(input_ids=torch.tensor([PROMPT])).logits[0]
    every = [*range(len(PROMPT))]
    fields = {"tokens": PROMPT, "edits": {key(tap): [edit(tap, x, len(PROMPT))]}}
    found = forward_reply(model, validate(ModelForwardRequest, fields | {"return": ["logits"], "positions": every}))
    np.testing.assert_allclose(found.logits, logits.detach(), atol=TOLERANCE, rtol=TOLERANCE)
    unedited = forward_reply(
        model, validate(ModelForwardRequest, {"tokens": PROMPT, "return": ["logits"], "positions": every})
    )
    assert np.abs(np.asarray(found.logits) - np.asarray(unedited.logits)).max() > 1e-3
    of = {"position": len(PROMPT) - 1, "token": 5}
    mine = ModelGradients(model, validate(ModelGradientsRequest, fields | {"wrt": ["embeddings"], "of": of})).reply()
    (expected,) = torch.autograd.grad(logits[-1].log_softmax(-1)[5], held[0])
    mine = np.asarray(mine.embeddings).reshape(expected.shape)
    np.testing.assert_allclose(mine, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.sampled
@pytest.mark.parametrize("begins", ["prompt", "answer"])
@pytest.mark.parametrize("tap", TAPS)
@pytest.mark.parametrize("kind", EVERY)
def test_tokens_are_those_of_a_hook_that_adds(kind, tap, begins):
    x = added(kind, tap)
    expected = Plain(kind, tap, x, first=len(PROMPT) if begins == "answer" else 0).generate(PROMPT, NEW)
    attention = {"edits": {key(tap): [edit(tap, x, len(PROMPT) + NEW)]}, "from": begins, "top_k": 1}
    found = alone(loaded(kind), PROMPT, max_tokens=NEW, attention=attention)
    assert tokens(found) == [expected]


def test_a_text_of_one_caller_is_what_it_is_alone_beside_sixteen_that_add_other_vectors():
    model, draws = loaded("llama"), torch.Generator().manual_seed(1)
    place = model.places["0"]
    shapes = {tap: [place.output_width] for tap in ("output", "mlp", "hidden", "embeddings")} | {
        "context": [1, place.widths.value_dim], "q": [1, place.widths.head_dim], "v": [1, place.widths.value_dim],
    }  # fmt: skip
    asked = {}
    for number in range(16):
        tap = [*shapes][number % len(shapes)]
        edits = {
            "embeddings" if tap == "embeddings" else str(number % 2): [
                {"tap": tap, "add": (3 * torch.randn(shapes[tap], generator=draws)).numpy()}
            ]
        }
        begins = "answer" if number % 3 == 0 else "prompt"
        asked[number] = {
            "prompt": text(5 + number % 5),
            "max_tokens": 4,
            "attention": {"edits": edits, "from": begins, "top_k": 1},
        }
    asked["plain"] = {"prompt": text(7), "max_tokens": 4}
    callers = Callers(model)
    for name, fields in asked.items():
        callers.ask(name, **fields)
    running = callers.running
    found = callers.end()
    assert min(each.joined for each in running.values()) == 17
    for name, fields in asked.items():
        same(found[name], alone(model, **fields))
    assert len({tuple(tokens(each)[0]) for each in found.values()}) > 8


def test_what_edits_wrote_is_read_again_by_the_same_edits_alone():
    x = added("llama", "output").numpy()
    steered = {"attention": {"edits": {str(LAYER): [{"tap": "output", "add": x}]}, "top_k": 1}}
    other = {"attention": {"edits": {str(LAYER): [{"tap": "output", "add": -x}]}, "top_k": 1}}
    with Server("llama") as server:
        first = server.ask(text(100), **steered)
        assert cached(*server.ask(text(100))) == 0
        assert cached(*server.ask(text(100), **other)) == 0
        again = server.ask(text(100), **steered)
        assert cached(*again) == 99
        assert token_ids(again[0]) == token_ids(first[0])


def test_an_edited_answer_reads_on_from_a_plain_prompt_and_leaves_its_prompt_alone():
    x = 4 * added("llama", "output").numpy()
    answers = {"edits": {str(LAYER): [{"tap": "output", "add": x}]}, "from": "answer", "top_k": 1}
    with Server("llama") as server:
        whole = server.ask(text(100), attention=answers)
        longer = text(100) + token_ids(whole[0]) + text(9)
        assert cached(*server.ask(longer)) == 100
        found = server.ask(text(100), attention=answers)
        assert cached(*found) == 99
        assert token_ids(found[0]) == token_ids(whole[0])


REFUSED = {
    "not finite": ([{"tap": "output", "add": [float("nan")]}], "attention.edits.0.0.add", "finite"),
    "of another width": ([{"tap": "output", "add": [1.0, 2.0, 3.0]}], "attention.edits.0.0.add", "broadcasts to"),
    "too large": ([{"tap": "q", "add": 1e39}], "attention.edits.0.0.add", "too large"),
}


@pytest.mark.parametrize(("edits", "param", "words"), REFUSED.values(), ids=REFUSED)
def test_a_tensor_that_cannot_be_added_is_refused_by_its_field(edits, param, words):
    with pytest.raises(InvalidRequest, match=words) as caught:
        alone(loaded("llama"), PROMPT, attention={"edits": {"0": edits}})
    assert caught.value.param == param
