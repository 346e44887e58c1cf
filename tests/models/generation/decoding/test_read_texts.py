"""Texts that ended: a prompt that begins as one of them has the tokens and the attention of one that is read whole."""

from functools import cache

import numpy as np
import orjson
import pytest
import torch
from safetensors.torch import save_file
from tests.client.tiny_models import tokenizer
from tests.models.small_models import device
from tools.models_walk.model_types import built

from attention_contract.schemas.openai import Completion, CompletionRequest
from attention_contract.validation import validate
from attention_service.models.generation.decoding.decoder import Decoder
from attention_service.models.generation.decoding.read_texts import LEAST
from attention_service.models.generation.generation import RunningGeneration, decode, read_prompts
from attention_service.models.generation.plans.generation_plan import plan_generation
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.process.reply_writing import lines_of
from attention_service.modules.checkpoints.adapter_files import AdapterFiles

LONG = {"max_position_embeddings": 1024}
KINDS = {
    "gpt2": {"n_positions": 1024},
    "llama": LONG,
    "mistral": LONG | {"sliding_window": 512},
    "deepseek_v3": LONG,
    "diffllama": LONG,
}
"""Types whose pasts can be cut."""
OTHERS = {"jamba": LONG, "deepseek_v32": LONG, "recurrent_gemma": LONG | {"attention_window_size": 16}}
"""Types whose pasts hold states, or more than keys and values."""
NEW = 5


@cache
def loaded(kind):
    torch.set_num_threads(1)
    model = built(kind, **(KINDS | OTHERS)[kind]).requires_grad_(False)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return LoadedModel(kind, model, tokenizer(), device())


class Server:
    """A model whose generations run one after the other, or together."""

    def __init__(self, kind, kept_bytes=2**22):
        self.model = loaded(kind)
        self.decoder = Decoder(self.model, kept_bytes)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.decoder.close()

    def ask(self, *prompts, reader="me", **fields):
        """Generate for each prompt, and return the answers."""
        running = []
        for prompt in prompts:
            options = {"max_tokens": NEW, "temperature": 0, "attention": {"top_k": 1}} | fields
            request = validate(CompletionRequest, {"model": self.model.name, "prompt": prompt} | options)
            plan = plan_generation(self.model, request)
            running.append(RunningGeneration(self.decoder, request, plan, lambda _: None, reader))
        while left := [each for each in running if not each.has_ended]:
            assert not read_prompts(self.decoder, left, 10_000)
            assert not decode(self.decoder, left)
        return [validate(Completion, orjson.loads(lines_of(each.end().last))) for each in running]


def text(tokens, begin=3):
    return [begin + 7 * number % 83 for number in range(tokens)]


def token_ids(answer):
    return [token.id for token in answer.choices[0].attention]


def cached(answer):
    return answer.usage.prompt_tokens_details.cached_tokens


def whole(kind, prompt):
    """The answer to a prompt that is read whole."""
    with Server(kind, 0) as server:
        (answer,) = server.ask(prompt)
    assert cached(answer) == 0
    return answer


@pytest.mark.sampled(kind=2)
@pytest.mark.parametrize("kind", KINDS)
def test_turns_of_a_conversation_read_what_is_new(kind):
    prompts, answers = [text(LEAST + 6)], []
    with Server(kind) as server:
        for turn in range(4):
            (answer,) = server.ask(prompts[-1])
            known = len(prompts[-2]) + NEW - 1 if turn else 0  # the last token has chosen none
            assert cached(answer) == known
            answers.append(answer)
            prompts.append(prompts[-1] + token_ids(answer) + text(20, turn))
    for prompt, answer in zip(prompts, answers, strict=False):
        expected = whole(kind, prompt)
        assert token_ids(answer) == token_ids(expected)
        for token, other in zip(answer.choices[0].attention, expected.choices[0].attention, strict=True):
            for layer, theirs in zip(token.layers, other.layers, strict=True):
                np.testing.assert_allclose(layer.top_keys.weights, theirs.top_keys.weights, atol=1e-5)


@pytest.mark.parametrize("kind", OTHERS)
def test_a_past_that_cannot_be_cut_is_not_kept(kind):
    with Server(kind) as server:
        (first,) = server.ask(text(80))
        (again,) = server.ask(text(80) + token_ids(first) + text(9))
    assert cached(again) == 0


def test_texts_that_shared_passes_are_kept_as_others():
    prompts = [text(90), text(70, 4), text(100, 5)]
    with Server("llama") as server:
        ended = server.ask(*prompts)
        longer = [prompt + token_ids(answer) + text(30, 9) for prompt, answer in zip(prompts, ended, strict=True)]
        again = server.ask(*longer)
        assert [cached(each) for each in again] == [len(prompt) + NEW - 1 for prompt in prompts]
    assert [token_ids(each) for each in again] == [token_ids(whole("llama", each)) for each in longer]


def test_a_beginning_of_a_text_is_enough():
    with Server("llama") as server:
        server.ask(text(100))
        other = text(80) + text(20, 11)
        (answer,) = server.ask(other)
        assert cached(answer) == 80
        (same,) = server.ask(text(100))
        assert cached(same) == 99  # the last token is read for what follows it
        assert cached(*server.ask(text(LEAST - 1) + text(30, 11))) == 0  # too little
        assert cached(*server.ask(text(80) + text(200, 12))) == 0  # the most is new
    assert token_ids(answer) == token_ids(whole("llama", other))


def test_nobody_reads_on_from_the_texts_of_another():
    with Server("llama") as server:
        server.ask(text(100), reader="me")
        assert cached(*server.ask(text(100), reader="you")) == 0
        assert cached(*server.ask(text(100), reader="me")) == 99


def test_a_text_that_runs_alone_reads_all_of_its_prompt_and_leaves_nothing():
    with Server("llama") as server:
        server.ask(text(100), alone=True)
        assert cached(*server.ask(text(100))) == 0
        assert cached(*server.ask(text(100), alone=True)) == 0


def test_the_texts_that_were_used_last_stay():
    model = loaded("llama").model.config
    token = 2 * 4 * model.num_hidden_layers * model.hidden_size * model.num_key_value_heads // model.num_attention_heads
    with Server("llama", 250 * token) as server:
        for begin in (3, 4):
            server.ask(text(100, begin))
        assert cached(*server.ask(text(100, 3))) == 99  # used again, so the other one goes
        server.ask(text(100, 5))
        assert [cached(*server.ask(text(100, begin))) for begin in (3, 5)] == [99, 99]
        assert cached(*server.ask(text(100, 4))) == 0
        server.ask(text(400, 6))
        assert cached(*server.ask(text(400, 6))) == 0  # it alone is too much
        assert server.decoder._read.bytes <= 250 * token


def test_choices_of_one_prompt_are_kept_once():
    with Server("llama") as server:
        server.ask(text(100), n=3, temperature=1, seed=0)
        assert len(server.decoder._read._texts) == 1


def test_what_an_adapter_has_read_is_kept_for_it_alone(tmp_path):
    rank, width = 4, loaded("llama").model.config.hidden_size
    (tmp_path / "adapter_config.json").write_text(orjson.dumps({"r": rank, "lora_alpha": rank}).decode())
    path = "base_model.model.model.layers.0.self_attn.k_proj"
    rows = loaded("llama").model.get_submodule("model.layers.0.self_attn.k_proj").out_features
    torch.manual_seed(0)
    tensors = {f"{path}.lora_A.weight": torch.randn(rank, width), f"{path}.lora_B.weight": torch.randn(rows, rank)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with Server("llama") as server:
        adapters = server.model.adapters
        adapter = adapters.load("own", AdapterFiles.open(tmp_path))
        (first,) = server.ask(text(80))
        longer = text(80) + token_ids(first) + text(9)
        with adapters.using(adapter):
            assert [cached(each) for each in server.ask(longer) + server.ask(longer)] == [0, len(longer) - 1]
        adapters.forget("own")
