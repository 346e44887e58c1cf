"""Generation with its past in sessions gives the tokens and scores of eager attention with its own cache."""

import copy
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache

from attention_client import Client
from attention_client.calls import Call
from attention_client.transformers import SessionCache, UnsupportedModel, attach
from attention_contract.errors import InvalidRequest, Overloaded
from tests.client.transformers.families import DECODERS, prompt, tiny

QUICK = {"gemma2", "gpt2", "gpt_oss", "llama"}
GREEDY = {"max_new_tokens": 6, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
WAYS = {"greedy": GREEDY, "beams": GREEDY | {"num_beams": 3}}


def walk(*families: str, quick: Set[str] = QUICK) -> list[object]:
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in families]


@contextmanager
def served(model: PreTrainedModel, client: Client, **options: object) -> Iterator[SessionCache]:
    with attach(model, client), SessionCache(model, client, **options) as cache:
        yield cache


@pytest.fixture
def spy(client: Client, monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], list[Call]]:
    """The calls of an operation, or of all, that were sent so far."""
    sent: list[Call] = []
    send = client.send  # that of all groups of calls

    def recorded(call):
        sent.append(call)
        return send(call)

    for sender in (client, client.modules):
        monkeypatch.setattr(sender, "send", recorded)
    return lambda name: [call for call in sent if name in {None, call.operation.name}]


def same_generation(found, expected) -> None:
    assert found.sequences.tolist() == expected.sequences.tolist()
    for ours, theirs in zip(found.scores, expected.scores, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", walk(*sorted(DECODERS.keys() - {"deepseek_v3"}), quick={"gpt_oss", "llama"}))
def test_a_padded_batch_generates_the_same(family, way, client):
    model, inputs = tiny(family), prompt()
    expected = model.generate(**inputs, **WAYS[way])
    with served(model, client) as cache:
        same_generation(model.generate(**inputs, **WAYS[way], past_key_values=cache), expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", walk(*sorted(QUICK), "mistral", "qwen3", quick={"gemma2"}))
def test_rejected_drafts_of_assisted_decoding_are_taken_back(family, client, spy):
    model, assistant = tiny(family), tiny(family, tie_word_embeddings=False)
    model.generation_config.eos_token_id = assistant.generation_config.eos_token_id = None
    with torch.no_grad():
        for parameter in assistant.parameters():  # wrong now and then
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
    assistant.generation_config.num_assistant_tokens = 3
    inputs = {name: tensor[1:] for name, tensor in prompt().items()}
    way = GREEDY | {"max_new_tokens": 16, "assistant_model": assistant}
    expected = model.generate(**inputs, **way)
    with served(model, client) as cache:
        same_generation(model.generate(**inputs, **way, past_key_values=cache), expected)
    steps = [call.request.query.shape[1] for call in spy("step_session")]
    assert max(steps[2:]) > 1, "a draft of several tokens is one step"
    assert spy("truncate_session")


@pytest.mark.parametrize("family", walk(*sorted(QUICK), "mistral", "qwen3", quick={"gemma2"}))
def test_the_second_turn_of_a_chat_continues_the_first(family, client, spy):
    model, turns = tiny(family), prompt(length=16, padding=0)["input_ids"]

    def chat(cache):
        first = model.generate(turns[:, :9], **GREEDY, past_key_values=cache)
        second = torch.cat([first.sequences, turns[:, 9:]], 1)
        return first, model.generate(second, **GREEDY, past_key_values=cache)

    expected = chat(DynamicCache(config=model.config))
    with served(model, client) as cache:
        for found, wanted in zip(chat(cache), expected, strict=True):
            same_generation(found, wanted)
    tokens = [call.request.query.shape[1] for call in spy("step_session")][::2]
    assert tokens == [9, 1, 1, 1, 1, 1, 8, 1, 1, 1, 1, 1], "the second turn sends what is new"


def test_a_step_sends_the_new_tokens_alone(client, spy):
    model, inputs = tiny("llama"), prompt()
    with served(model, client) as cache:
        model.generate(**inputs, **GREEDY, past_key_values=cache)
    calls = [call.request for call in spy("step_session")]
    heads, kv = 4 * 8, 2 * 8
    assert [request.query.shape for request in calls] == 2 * [(2, 9, heads)] + 10 * [(2, 1, heads)]
    assert all(request.key.shape[2] == request.value.shape[2] == kv for request in calls)
    assert all(request.mask is None and request.key_mask.shape == (2, 9 + i // 2) for i, request in enumerate(calls))
    others = {call.operation.name for call in spy(None)}
    assert others == {"open_session", "create_module", "step_session", "delete_session", "delete_module"}


def test_without_padding_a_step_sends_no_mask(client, spy):
    model = tiny("gemma2")  # causal, and a window of 4
    with served(model, client) as cache:
        model.generate(prompt(padding=0)["input_ids"], **GREEDY, past_key_values=cache)
    for call in spy("step_session"):
        assert call.request.mask is None
        assert call.request.key_mask is None


@pytest.mark.slow
def test_a_stream_carries_the_steps_of_all_layers(client, spy):
    model, inputs = tiny("gemma2"), prompt()
    expected = model.generate(**inputs, **WAYS["beams"])
    with served(model, client, stream=True) as cache, copy.deepcopy(cache) as other:
        for each in (cache, other):
            same_generation(model.generate(**inputs, **WAYS["beams"], past_key_values=each), expected)
    assert not spy("step_session")


# ── pasts of other caches ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.sampled(family=1)
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", pytest.param("lfm2", marks=pytest.mark.slow)])
@torch.no_grad()
def test_a_dynamic_cache_goes_to_sessions_and_back(family, client):
    model, tokens = tiny(family), prompt(length=15, padding=0)["input_ids"]
    local = DynamicCache(config=model.config)
    model(tokens[:, :8], past_key_values=local)
    past = copy.deepcopy(local)
    expected = [model(tokens[:, i : i + 1], past_key_values=past).logits for i in range(8, 15)]
    with attach(model, client), SessionCache.from_dynamic(local, model, client) as cache:
        found = [model(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(8, 12)]
        back = cache.to_dynamic()
        fetched = cache.to_dynamic()
    assert back.get_seq_length() == 12
    found += [model(tokens[:, i : i + 1], past_key_values=back).logits for i in range(12, 15)]
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), atol=1e-5, rtol=1e-5)
    untouched = SessionCache.from_dynamic(fetched, model, client).to_dynamic()
    for ours, theirs in list(zip(untouched.layers, fetched.layers, strict=True))[family == "lfm2" :]:
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=0, atol=0)
        assert ours.get_seq_length() == theirs.get_seq_length()


@torch.no_grad()
def test_a_window_that_was_cut_is_not_taken_back_too_far(client):
    model, tokens = tiny("mistral"), prompt(padding=0)["input_ids"]
    local = DynamicCache(config=model.config)
    model(tokens, past_key_values=local)
    with attach(model, client), SessionCache.from_dynamic(local, model, client) as cache:
        model(tokens[:, :2], past_key_values=cache)
        cache.crop(-2)
        with pytest.raises(RuntimeError, match="the shortest is 9"):
            cache.crop(-1)
    with pytest.raises(TypeError, match="expected a DynamicCache, got StaticCache"):
        SessionCache.from_dynamic(StaticCache(config=model.config, max_cache_len=4), model, client)


@pytest.mark.slow
@torch.no_grad()
def test_rows_are_repeated_selected_and_reordered_as_in_a_dynamic_cache(client):
    model, tokens = tiny("llama"), prompt(padding=0)["input_ids"]
    changes = [
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.reorder_cache(torch.tensor([3, 0, 0, 2])),
        lambda cache: cache.batch_select_indices(torch.tensor([True, True, False, True])),
        lambda cache: cache.batch_select_indices(torch.tensor([2, 0])),
        lambda cache: cache.crop(-3),
        lambda cache: cache.crop(-cache.get_seq_length()),
        lambda cache: cache.reset(),
    ]

    def walk_through(cache):
        found = []
        model(tokens, past_key_values=cache)
        for change, after in zip(changes, [4, 4, 3, 2, 2, 2, 3], strict=True):
            change(cache)
            found.append(model(tokens[:1, :2].repeat(after, 1), past_key_values=cache).logits)
        return found

    expected = walk_through(DynamicCache(config=model.config))
    with served(model, client) as cache:
        for ours, theirs in zip(walk_through(cache), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        before = SessionCache.from_dynamic(cache.to_dynamic(), model, client)
        before.batch_repeat_interleave(2)  # before its sessions are open
        before.crop(-1)
        cache.batch_repeat_interleave(2)
        cache.crop(-1)
        wanted = model(tokens[:1, :1].repeat(6, 1), past_key_values=cache).logits
        with before:
            torch.testing.assert_close(model(tokens[:1, :1].repeat(6, 1), past_key_values=before).logits, wanted)


@torch.no_grad()
def test_a_copy_is_a_fork_that_goes_its_own_way(client, spy):
    model, tokens = tiny("gemma2"), prompt(padding=0)["input_ids"]

    def continued(cache, token):
        return model(torch.full((2, 1), token), past_key_values=cache).logits

    expected = DynamicCache(config=model.config)
    model(tokens, past_key_values=expected)
    with served(model, client) as cache:
        model(tokens, past_key_values=cache)
        sent = len(spy("step_session"))
        with copy.deepcopy(cache) as other:
            assert len(spy("fork_session")) == 2
            assert len(spy("step_session")) == sent, "nothing was computed again"
            found = [continued(other, 5), continued(cache, 7)]
        found.append(continued(cache, 8))
    wanted = [continued(copy.deepcopy(expected), 5), continued(expected, 7), continued(expected, 8)]
    torch.testing.assert_close(torch.cat(found), torch.cat(wanted), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_the_decoder_of_a_pair_has_its_own_past_in_sessions(client):
    model, inputs = tiny("t5"), prompt()
    for way in WAYS.values():
        expected = model.generate(**inputs, **way)
        with served(model, client) as cache:
            both = EncoderDecoderCache(cache, DynamicCache(config=model.config))
            same_generation(model.generate(**inputs, **way, past_key_values=both), expected)


# ── taps, edits, and layers that stay local ──────────────────────────────────────────────────────────────────────────


def test_taps_and_edits_are_those_of_a_local_past(client):
    model, inputs = tiny("gpt_oss"), prompt()
    edits = {1: [{"tap": "weights", "heads": [1], "set": 0}]}
    with attach(model, client, record=["q", "k", "scores", "weights", "context"], edits=edits) as attached:
        expected = model.generate(**inputs, **GREEDY)
        wanted = attached.recorded
        with SessionCache(model, client) as cache:
            same_generation(model.generate(**inputs, **GREEDY, past_key_values=cache), expected)
        found = attached.recorded
    assert found[0]["weights"].shape == (2, 4, 1, 14)
    assert not found[1]["weights"][:, 1].any()
    for layer, tap in [(1, "q"), (1, "weights"), (1, "context"), (0, "context")]:
        torch.testing.assert_close(
            torch.as_tensor(found[layer][tap]), torch.as_tensor(wanted[layer][tap]), atol=1e-5, rtol=1e-5
        )


def test_other_layers_keep_their_tensors(client):
    model, inputs = tiny("gemma2"), prompt(padding=0)
    expected = model.generate(**inputs, **GREEDY)
    with attach(model, client, layers=[1]), SessionCache(model, client, layers=[1]) as cache:
        same_generation(model.generate(**inputs, **GREEDY, past_key_values=cache), expected)
        assert cache.layers[0].keys.shape[2] == 14
        local = cache.to_dynamic()
        assert local.layers[0].keys.shape[2] == 3, "its window"
        with SessionCache.from_dynamic(local, model, client, layers=[1]) as again:
            found = model.generate(expected.sequences, **GREEDY, past_key_values=again)
        with SessionCache(model, client) as whole, pytest.raises(UnsupportedModel, match=r"layers=\[1\]"):
            model.generate(**inputs, **GREEDY, past_key_values=whole)
    same_generation(found, model.generate(expected.sequences, **GREEDY))
    with pytest.raises(InvalidRequest, match=r"layers: expected numbers below 2; got \[7\]"):
        SessionCache(model, client, layers=[1, 7])


def test_bfloat16_stays_bfloat16(client):
    model, inputs = tiny("llama").bfloat16(), prompt()
    with served(model, client) as cache:
        model.generate(**inputs, **GREEDY, past_key_values=cache)
        assert cache.to_dynamic().layers[0].keys.dtype == torch.bfloat16


@torch.no_grad()
def test_a_policy_drops_tokens_of_every_layer(client):
    model, tokens = tiny("llama"), prompt(length=12, padding=0)["input_ids"]
    i, j = torch.arange(12)[:, None], torch.arange(12)
    kept = (j <= i) & ((j < 1) | (j >= i - 3) | (i < 5))  # the prompt sees itself; later tokens a sink and the last 3
    mask = torch.zeros(2, 1, 12, 12).masked_fill(~kept, torch.finfo(torch.float32).min)
    expected = model(tokens, attention_mask=mask).logits[:, 4:]
    with served(model, client, policy={"name": "window_sinks", "window": 3, "sinks": 1}) as cache:
        found = [model(tokens[:, :5], past_key_values=cache).logits[:, -1:]]
        found += [model(tokens[:, at : at + 1], past_key_values=cache).logits for at in range(5, 12)]
        assert cache.get_seq_length() == 12
        assert cache.layers[0].session.info().held == 4
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-5, rtol=1e-5)


# ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.sampled(stream=1)
@pytest.mark.parametrize("stream", [False, True])
@torch.no_grad()
def test_sessions_and_modules_that_the_server_lost_are_made_again(stream, client, spy, caplog):
    model, tokens = tiny("gpt_oss"), prompt(padding=0)["input_ids"]
    expected = DynamicCache(config=model.config)
    model(tokens, past_key_values=expected)
    with served(model, client, ttl_s=0.2, stream=stream) as cache:
        model(tokens, past_key_values=cache)
        for call in spy("create_module"):
            client.modules.delete(call.request.name)
        time.sleep(0.4)
        found = model(tokens[:, :1], past_key_values=cache).logits
    torch.testing.assert_close(found, model(tokens[:, :1], past_key_values=expected).logits, atol=1e-5, rtol=1e-5)
    assert caplog.text.count("replayed 9 tokens") == 2
    assert bool(spy("step_session")) != stream


@pytest.mark.parametrize("layers", [None, [1]])
@torch.no_grad()
def test_a_pass_that_fails_appends_nothing(layers, client, monkeypatch):
    model, tokens = tiny("llama"), prompt(padding=0)["input_ids"]
    expected = DynamicCache(config=model.config)
    model(tokens[:, :8], past_key_values=expected)
    with attach(model, client, layers=layers), SessionCache(model, client, layers=layers) as cache:
        model(tokens[:, :8], past_key_values=cache)
        with monkeypatch.context() as patch:
            patch.setattr(cache.layers[1].session, "step", failing)
            with pytest.raises(Overloaded):
                model(tokens[:, 8:], past_key_values=cache)
        assert [layer.get_seq_length() for layer in cache.layers] == [8, 8]
        found = model(tokens[:, 8:], past_key_values=cache).logits
    torch.testing.assert_close(found, model(tokens[:, 8:], past_key_values=expected).logits, atol=1e-5, rtol=1e-5)


def failing(*_, **__):
    raise Overloaded("too many")


@torch.no_grad()
def test_a_pass_that_cannot_be_taken_back_needs_a_reset(client, monkeypatch):
    model, tokens = tiny("llama"), prompt(padding=0)["input_ids"]
    expected = model(tokens).logits
    with served(model, client) as cache:
        model(tokens[:, :8], past_key_values=cache)
        with monkeypatch.context() as patch:
            patch.setattr(cache.layers[1].session, "step", failing)
            patch.setattr(cache.layers[0].session, "truncate", failing)
            with pytest.raises(Overloaded):
                model(tokens[:, 8:], past_key_values=cache)
        with pytest.raises(UnsupportedModel, match=r"could not be taken back, and the cache needs reset\(\)"):
            model(tokens[:, 8:], past_key_values=cache)
        cache.reset()
        torch.testing.assert_close(model(tokens, past_key_values=cache).logits, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_server_that_is_gone_hides_no_other_error(client, monkeypatch):
    model = tiny("llama")

    def lost() -> SessionCache:
        with attach(model, client):
            model(prompt()["input_ids"], past_key_values=(cache := SessionCache(model, client)))
        monkeypatch.setattr(cache.layers[1].session, "close", failing)
        return cache

    with pytest.raises(ZeroDivisionError), lost():
        raise ZeroDivisionError
    with pytest.raises(Overloaded), lost():
        pass


def test_nothing_is_left_on_the_server(client, spy):
    model = tiny("gpt2")
    with served(model, client) as cache:
        model.generate(prompt(padding=0)["input_ids"], **GREEDY, past_key_values=cache)
        ids, names = {layer.session.id for layer in cache.layers}, {call.request.name for call in spy("create_module")}
        assert ids <= {session.session for session in client.sessions.list().sessions}
    assert len(ids) == 2
    assert not ids & {session.session for session in client.sessions.list().sessions}
    assert names
    assert not names & {module.name for module in client.modules.list().modules}


def test_a_model_that_sessions_cannot_serve_says_why(client):
    inputs = prompt(padding=0)
    model = tiny("llama")
    with SessionCache(model, client) as cache:
        with pytest.raises(UnsupportedModel, match=r"'eager'; call it within `with attach\(model, client\):`"):
            model.generate(**inputs, **GREEDY, past_key_values=cache)
        with attach(model, client):
            with pytest.raises(InvalidRequest, match=r"gives no gradients; call the model under torch.no_grad\(\)"):
                model(**inputs, past_key_values=cache)
            sees_all = torch.ones(2, 1, 9, 9, dtype=torch.bool)
            with torch.no_grad(), pytest.raises(UnsupportedModel, match="a token of this model sees later tokens"):
                model(inputs["input_ids"], attention_mask=sees_all, past_key_values=cache)
            cache.reset()
            with torch.no_grad(), pytest.raises(UnsupportedModel, match="a mask over the 9 tokens of the cache"):
                model(inputs["input_ids"], attention_mask=sees_all[..., :5], past_key_values=cache)
            cache.reset()
            with pytest.raises(ValueError, match="expected a negative number of tokens to remove, got 3"):
                cache.crop(3)
    latent = tiny("deepseek_v3")
    with served(latent, client) as cache, pytest.raises(UnsupportedModel, match="changes keys after it has cached"):
        latent.generate(**inputs, **GREEDY, past_key_values=cache)
    with pytest.raises(TypeError, match=r"expected an attention_client\.Client"):
        SessionCache(model, "http://127.0.0.1:8000")
    with pytest.raises(TypeError, match="expected a PreTrainedModel of transformers, got Linear"):
        SessionCache(torch.nn.Linear(1, 1), client)


@torch.no_grad()
def test_a_mask_of_the_caller_is_sent_whole(client, spy):
    model, tokens = tiny("llama"), prompt(padding=0)["input_ids"]
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    mask[:, :, 5:, 2] = False
    floats = torch.zeros(2, 1, 9, 9).masked_fill(~mask, torch.finfo(torch.float32).min)
    expected = model(tokens, attention_mask=floats).logits
    for each in (mask, floats):
        with served(model, client) as cache:
            found = model(tokens, attention_mask=each, past_key_values=cache).logits
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert all(call.request.mask.shape == (2, 1, 9, 9) for call in spy("step_session"))
