"""The masks that requests carry: few numbers where these are all there is, and never the wrong ones."""

from typing import Any

import pytest
import torch
from transformers import StaticCache
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from attention_client import Client
from attention_client.transformers import attach
from attention_contract.spec import Causal, SlidingWindow
from attention_transformers.model_masks import known_mask, service_mask
from tests.client.transformers.families import prompt, tiny


def made(**options: Any) -> torch.Tensor | None:
    return service_mask(**{"batch_size": 2, "q_length": 6, "kv_length": 6} | options)


PADDING = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]).bool()


def test_plain_causality_makes_no_mask():
    assert made() is None
    assert made(attention_mask=torch.ones_like(PADDING)) is None


def test_padding_and_causality_are_a_key_mask_and_a_spec():
    known = known_mask(made(attention_mask=PADDING))
    assert known.masks == (Causal(),)
    assert torch.equal(known.key_mask, PADDING)


def test_a_window_after_a_past_is_a_spec_with_an_offset():
    window = {"mask_function": sliding_window_causal_mask_function(3), "local_size": 3}
    known = known_mask(made(q_length=4, kv_length=7, q_offset=13, kv_offset=10, **window))
    assert known.masks == (SlidingWindow(left=2, right=0),)
    assert (known.offset, known.key_mask, known.keys) == (3, None, 7)


def test_a_window_to_both_sides_is_a_spec():
    window = {"mask_function": sliding_window_bidirectional_mask_function(2), "local_size": 2}
    assert known_mask(made(allow_is_causal_skip=False, **window)).masks == (SlidingWindow(left=2, right=2),)


def test_a_window_of_nothing_is_no_fault():
    nothing = {"mask_function": sliding_window_causal_mask_function(0), "local_size": 0}
    assert known_mask(made(**nothing)) is None


def test_one_query_has_a_key_mask_alone():
    known = known_mask(made(q_length=1, q_offset=3, allow_is_causal_skip=False, attention_mask=PADDING))
    assert known.masks == ()
    assert known.keys == 4, "the static cache holds two keys that are not there yet"
    assert known.key_mask.tolist() == [[False, False, True, True], [True] * 4]


@pytest.mark.parametrize(
    "function",
    [
        chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int64)),
        or_masks(causal_mask_function, lambda b, h, q, k: k == 5),
    ],
)
def test_other_masks_are_sent_whole(function):
    assert known_mask(made(mask_function=function, local_size=3, allow_is_causal_skip=False)) is None


def test_a_changed_mask_is_no_longer_known():
    mask = made(attention_mask=PADDING)
    assert known_mask(mask) is not None
    assert known_mask(mask[:, :, 1:]) is None
    assert known_mask(mask & mask) is None


def test_requests_carry_few_numbers(client, monkeypatch):
    sent = sent_by(client, monkeypatch)
    model = tiny("mistral")
    with torch.no_grad(), attach(model, client):
        model(**prompt())
        model(prompt()["input_ids"])
    assert len(sent) == 4
    assert all(request.mask is None for request in sent)
    assert [request.key_mask is None for request in sent] == [False, False, True, True]
    assert all(request.spec.masks == [SlidingWindow(left=3, right=0)] for request in sent)


def test_a_static_cache_sends_the_keys_that_are_there(client, monkeypatch):
    sent = sent_by(client, monkeypatch)
    model = tiny("llama")
    with torch.no_grad(), attach(model, client):
        cache = StaticCache(model.config, max_cache_len=40)
        model(prompt()["input_ids"][1:], past_key_values=cache)
        model(torch.tensor([[5]]), past_key_values=cache)
    assert [request.key.shape[2] for request in sent] == [9, 9, 10, 10]
    assert all(request.mask is None and request.key_mask is None for request in sent)


def sent_by(client: Client, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list that every request of a client joins."""
    requests, send = [], client.send

    def note(call: Any, *args: Any, **options: Any) -> Any:
        requests.append(call.request)
        return send(call, *args, **options)

    monkeypatch.setattr(client, "send", note)
    return requests


def test_custom_masks_are_added_and_rows_without_keys_give_zeros(client):
    model, tokens = tiny("llama"), prompt()["input_ids"][1:]
    allowed = torch.rand(1, 1, 9, 9, generator=torch.Generator().manual_seed(3)) < 0.6
    allowed[..., 0] = True
    allowed[0, 0, 4] = False
    floats = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    kept = allowed.any(-1)[0, 0]
    with torch.no_grad():
        expected = model(tokens, attention_mask=floats, output_attentions=True).attentions[0]
        for mask in (allowed, floats):
            with attach(model, client, record=["weights", "context"]) as attached:
                model(tokens, attention_mask=mask)
            found = attached.recorded[0]
            torch.testing.assert_close(torch.from_numpy(found["weights"])[:, :, kept], expected[:, :, kept])
            assert not found["weights"][:, :, 4].any()
            assert not found["context"][:, :, 4].any()
