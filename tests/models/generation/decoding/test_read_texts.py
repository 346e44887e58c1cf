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
from attention_service.core.cancellation import Cancellation, cancellable
from attention_service.models.generation.decoding import decoder
from attention_service.models.generation.decoding.decoder import Decoder
from attention_service.models.generation.decoding.read_texts import LEAST
from attention_service.models.generation.generation import RunningGeneration
from attention_service.models.generation.generation_turns import decode, read_prompts
from attention_service.models.generation.plans.generation_plan import plan_generation
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.process.reply_writing import lines_of
from attention_service.modules.checkpoints.adapter_files import AdapterFiles

LONG = {"max_position_embeddings": 1024}
WINDOW = LONG | {"sliding_window": 16}
CUTTABLE = {
    "gpt2": ("gpt2", {"n_positions": 1024}),
    "llama": ("llama", LONG),
    "mistral": ("mistral", LONG | {"sliding_window": 512}),
    "deepseek_v3": ("deepseek_v3", LONG),
    "diffllama": ("diffllama", LONG),
    "deepseek_v32": ("deepseek_v32", LONG | {"index_n_heads": 32}),  # no two tokens have one score
    "bloom": ("bloom", {}),
}
"""Types whose pasts can be cut, with entries of their config."""
WHOLE = {
    "mistral, beyond its window": ("mistral", WINDOW),
    "gemma2": ("gemma2", WINDOW),
    "gemma3_text": ("gemma3_text", WINDOW),
    "gpt_oss": ("gpt_oss", WINDOW),
    "llama4_text": ("llama4_text", LONG | {"attention_chunk_size": 16}),
    "lfm2": ("lfm2", LONG | {"layer_types": ["conv", "full_attention"]}),
    "qwen3_next": ("qwen3_next", LONG),
    "kimi_linear": ("kimi_linear", LONG),
    "falcon_h1": ("falcon_h1", LONG),
    "bamba": ("bamba", LONG),
    "mamba2": ("mamba2", LONG),
    "jamba": ("jamba", LONG),
    "mamba": ("mamba", LONG),
    "minimax": ("minimax", LONG),
    "recurrent_gemma": ("recurrent_gemma", LONG | {"attention_window_size": 16}),
    "rwkv": ("rwkv", LONG),
    "xlstm": ("xlstm", {}),
}
"""Types with windows and with states, whose pasts serve prompts that begin with all of a text."""
ONE_BY_ONE = {"jamba", "mamba", "recurrent_gemma"}
"""Of these, the ones that go on from a state by one token a pass."""
APART = {"minimax", "recurrent_gemma", "rwkv", "xlstm"}
"""Those whose texts share no passes."""
OF_PROMPTS = {
    "nemotron_h": ("nemotron_h", LONG),
    "zamba2": ("zamba2", LONG),
}
"""Types whose state after steps is other than after a pass, so that the past of a prompt alone serves others."""
OTHERS = {"openai-gpt": ("openai-gpt", {"n_positions": 1024}), "bert-generation": ("bert-generation", LONG)}
"""Types without a past, or whose tokens look at those behind them."""
KINDS = CUTTABLE | WHOLE | OF_PROMPTS | OTHERS
NEW = 5


@cache
def loaded(kind, dtype=torch.float32):
    torch.set_num_threads(1)
    name, entries = KINDS[kind]
    model = built(name, **entries).requires_grad_(False).to(dtype)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return LoadedModel(kind, model, tokenizer(), device())


class Server:
    """A model whose generations run one after the other, or together."""

    def __init__(self, kind, kept_bytes=2**22, dtype=torch.float32):
        self.model = loaded(kind, dtype)
        self.decoder = Decoder(self.model, kept_bytes)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.decoder.close()

    def ask(self, *prompts, reader="me", **fields):
        """Generate for each prompt, and return the answers."""
        running = []
        for prompt in prompts:
            options = {"max_tokens": NEW, "temperature": 0, "logprobs": 0}
            options |= {"attention": {"top_k": 1}} if self.model.places else {}
            options |= fields
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


def chosen(kind, prompt, answer):
    """The tokens of an answer, by transformers itself where nothing tells them."""
    if loaded(kind).places:
        return token_ids(answer)
    ids = torch.tensor([prompt])
    return (
        loaded(kind)
        .model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)[0, len(prompt) :]
        .tolist()
    )


def cached(answer):
    return answer.usage.prompt_tokens_details.cached_tokens


def whole(kind, prompt, dtype=torch.float32, **fields):
    """The answer to a prompt that is read whole."""
    with Server(kind, 0, dtype) as server:
        (answer,) = server.ask(prompt, **fields)
    assert cached(answer) == 0
    return answer


def same(answer, expected, tolerance=1e-5):
    """The tokens, their log-probabilities, and the attention that chose them."""
    (one,), (other,) = answer.choices, expected.choices
    assert one.text == other.text
    np.testing.assert_allclose(one.logprobs.token_logprobs, other.logprobs.token_logprobs, atol=tolerance)
    for token, theirs in zip(one.attention or (), other.attention or (), strict=True):
        assert token.id == theirs.id
        for layer, own in zip(token.layers, theirs.layers, strict=True):
            np.testing.assert_allclose(layer.top_keys.weights, own.top_keys.weights, atol=tolerance)


def more(kind):
    """The new tokens of a turn: few beside all, where each has a pass of its own."""
    return 4 if kind in ONE_BY_ONE else 20


def known_of(kind, prompt):
    """The number of the tokens of a turn that the next one does not read again."""
    return len(prompt) + (0 if kind in OF_PROMPTS else NEW - 1)  # the last token has chosen none


@pytest.mark.sampled(kind=3)
@pytest.mark.parametrize("kind", CUTTABLE | WHOLE | OF_PROMPTS)
def test_turns_of_a_conversation_read_what_is_new(kind):
    prompts, answers = [text(LEAST + 12)], []
    with Server(kind) as server:
        for turn in range(4):
            (answer,) = server.ask(prompts[-1])
            assert cached(answer) == (known_of(kind, prompts[-2]) if turn else 0)
            answers.append(answer)
            prompts.append(prompts[-1] + chosen(kind, prompts[-1], answer) + text(more(kind), turn))
    for prompt, answer in zip(prompts, answers, strict=False):
        same(answer, whole(kind, prompt))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mistral, beyond its window", "gemma3_text", "lfm2", "falcon_h1", "mamba"])
def test_in_float64_a_turn_has_the_numbers_of_one_that_reads_all(kind):
    first = text(90)
    with Server(kind, dtype=torch.float64) as server:
        (answer,) = server.ask(first)
        second = first + chosen(kind, first, answer) + text(more(kind))
        (again,) = server.ask(second, attention=None)
        assert cached(again) == len(first) + NEW - 1
    same(again, whole(kind, second, torch.float64, attention=None), 1e-10)


@pytest.mark.sampled(kind=3)
@pytest.mark.parametrize("kind", ["llama", *WHOLE])
def test_texts_that_share_passes_are_kept_and_read_on_as_others(kind):
    prompts = [text(90), text(70, 4), text(100, 5)]
    with Server(kind) as server:
        ended = server.ask(*prompts)
        assert server.decoder.joining.unlike == (kind not in APART)
        longer = [
            prompt + chosen(kind, prompt, answer) + text(more(kind), 9)
            for prompt, answer in zip(prompts, ended, strict=True)
        ]
        longer.append(text(40, 12))
        again = server.ask(*longer)
        assert [cached(each) for each in again] == [*(len(prompt) + NEW - 1 for prompt in prompts), 0]
    for prompt, answer in zip(longer, again, strict=True):
        same(answer, whole(kind, prompt))


@pytest.mark.sampled(kind=3)
@pytest.mark.parametrize("kind", WHOLE)
def test_a_window_that_moved_and_a_state_serve_prompts_that_begin_with_all_of_their_text(kind):
    first = text(100)
    with Server(kind) as server:
        (answer,) = server.ask(first)
        known = first + chosen(kind, first, answer)[:-1]
        assert cached(*server.ask([*known, 9, 8], reader="you")) == 0
        for changed in (0, 50, len(known) - 1):
            other = [*known]
            other[changed] = 3 + (known[changed] - 2) % 83
            (found,) = server.ask([*other, 9, 8], alone=False, reader="me", max_tokens=1)
            assert cached(found) == 0
        assert cached(*server.ask(known, max_tokens=1)) == 0  # its last token is to be read
        assert cached(*server.ask(known[:-3], max_tokens=1)) == 0
        assert cached(*server.ask([*known, 9], alone=True)) == 0
        longer = [[*known, 9, 8], [*known, 8, 9, 7]]
        answers = server.ask(*longer)  # each goes on from states of its own
        assert [cached(each) for each in answers] == [len(known)] * 2
    for prompt, answer in zip(longer, answers, strict=True):
        same(answer, whole(kind, prompt))


@pytest.mark.parametrize("kind", ["mistral, beyond its window", "lfm2", "jamba"])
def test_no_more_than_the_new_tokens_is_read(kind):
    first, passes = text(100), []
    with Server(kind) as server:
        (answer,) = server.ask(first)
        server.decoder.joining  # noqa: B018  # the trial, which has passes of its own
        hook = server.model.model.register_forward_pre_hook(
            lambda _, __, given: passes.append(given["input_ids"].shape[1]), with_kwargs=True
        )
        try:
            server.ask(first + chosen(kind, first, answer) + text(5))
        finally:
            hook.remove()
    assert passes == ([1] * 6 if kind in ONE_BY_ONE else [6]) + [1] * (NEW - 1)


def test_the_memory_of_a_window_is_counted_and_no_more_is_held():
    config = loaded("mistral, beyond its window").model.config
    with Server("mistral, beyond its window") as server:
        server.ask(text(400), max_tokens=1)
        (kept,) = server.decoder._read._texts
        tensors = [x for layer in kept.past.layers for x in vars(layer).values() if isinstance(x, torch.Tensor)]
        assert {x.shape[2] for x in tensors if x.ndim == 4} == {config.sliding_window - 1}
        assert sum(x.untyped_storage().nbytes() for x in tensors) == server.decoder._read.bytes


def test_states_are_counted_and_the_oldest_go_first():
    with Server("jamba") as server:
        server.ask(text(100))
        size = server.decoder._read.bytes
        (kept,) = server.decoder._read._texts
        layers = kept.past.layers
        states = [
            x
            for each in layers
            for name in ("conv_states", "recurrent_states")
            for x in getattr(each, name, {}).values()
        ]
        assert size > sum(x.nbytes for x in states) > 0
    with Server("jamba", 2 * size) as server:
        known = {
            begin: text(100, begin) + chosen("jamba", text(100, begin), *server.ask(text(100, begin)))
            for begin in (3, 4, 5)
        }
        assert [cached(*server.ask(known[begin], max_tokens=1)) for begin in (5, 3)] == [104, 0]


def test_edits_are_a_part_of_what_is_kept():
    first, edits = text(100), {"1": [{"tap": "weights", "heads": [0], "set": 0.0}]}
    edited = {"attention": {"top_k": 1, "edits": edits}}
    with Server("lfm2") as server:
        (answer,) = server.ask(first, **edited)
        longer = first + token_ids(answer) + text(20)
        assert cached(*server.ask(longer)) == 0
        (again,) = server.ask(longer, **edited)
        assert cached(again) == len(first) + NEW - 1
    same(again, whole("lfm2", longer, **edited))


@pytest.mark.parametrize(("rest", "known"), [([9], 0), ([9, 8], 100)])
def test_a_prompt_is_read_whole_where_its_end_would_be_one_step_that_is_other_than_a_pass(rest, known):
    first = text(100)
    with Server("nemotron_h") as server:
        server.ask(first)
        (again,) = server.ask(first + rest)
    assert cached(again) == known
    same(again, whole("nemotron_h", first + rest))


@pytest.mark.parametrize("rest", [0, 1, 2])
def test_no_part_of_a_prompt_is_one_step_where_steps_are_other_than_passes(rest, monkeypatch):
    monkeypatch.setattr(decoder, "PART", 16)
    prompt, passes = text(48 + rest), []
    with Server("nemotron_h", 0) as server:
        hook = server.model.model.register_forward_pre_hook(
            lambda _, __, given: passes.append(given["input_ids"].shape[1]), with_kwargs=True
        )
        server.decoder.reading  # noqa: B018  # the trial, which has passes of its own
        passes.clear()
        try:
            (answer,) = server.ask(prompt)
        finally:
            hook.remove()
    assert passes[: 3 + (rest > 0)] == {0: [16, 16, 16], 1: [16, 16, 15, 2], 2: [16, 16, 16, 2]}[rest]
    monkeypatch.setattr(decoder, "PART", 512)
    same(answer, whole("nemotron_h", prompt))


def test_one_who_leaves_during_a_trial_leaves_it_to_the_others():
    first = text(100)
    with Server("llama") as server:
        left = Cancellation()
        left.cancel()
        with cancellable(left):
            assert server.decoder.reading.in_parts
            assert server.decoder.joining.unlike
        server.ask(first)
        assert cached(*server.ask(first)) == 99


@pytest.mark.parametrize("kind", OTHERS)
def test_a_text_of_other_types_is_read_again(kind):
    with Server(kind) as server:
        (first,) = server.ask(text(80))
        (again,) = server.ask(text(80) + chosen(kind, text(80), first) + text(4))
        assert server.decoder.reading.reason
    assert cached(again) == 0


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
