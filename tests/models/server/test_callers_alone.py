"""Many callers of one model with unlike texts, edits and seeds: each gets the reply that its request has alone.

``SOAK_SECONDS`` says for how long they ask; each reply is compared afterwards.
"""

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

pytestmark = pytest.mark.slow
MODEL, CALLERS, SECONDS = "tiny", 16, float(os.environ.get("SOAK_SECONDS", "20"))
TAPS = ("scores", "weights", "context", "v", "output")
BOUND = 1e-5
"""Of the largest logit, as docs/models.md states it for float32; of weights and statistics it is the number itself."""


def edits_of(chance):
    """The edits of some layer, or none."""
    tap = chance.choice((None, None, *TAPS))
    if tap is None:
        return {}
    edit = {"tap": tap, "scale": chance.choice((0.0, 0.5, 2.0))}
    if tap != "output":
        edit["heads"] = [chance.randrange(2)]
    return {str(chance.randrange(2)): [edit]}


def request_of(chance):
    """A path and a body, unlike those of others."""
    tokens = [chance.randrange(3, 90) for _ in range(chance.choice((3, 5, 9, 14, 30, 60)))]
    kind = chance.choice(("forward", "weights", "greedy", "drawn"))
    if kind in {"forward", "weights"}:
        body = {"tokens": tokens, "edits": edits_of(chance)}
        if kind == "weights":
            body |= {"return_weights": len(tokens) < 10, "statistics": ["entropy", "own_position"]}
        return f"/v1/models/{MODEL}/{kind}", body
    body = {"model": MODEL, "prompt": tokens, "max_tokens": chance.choice((1, 4, 12, 24))}
    body |= {"temperature": 0} if kind == "greedy" else {"temperature": 0.9, "seed": chance.randrange(2**31)}
    if chance.random() < 0.7:
        body["attention"] = {"statistics": ["entropy"], "edits": edits_of(chance)}
    return "/v1/completions", body


def ask_for(url, seed, seconds):
    """Ask one request after the other. Returns them with their replies."""
    chance, found, end = random.Random(seed), [], time.monotonic() + seconds
    with httpx.Client(base_url=url, timeout=120) as http:
        while time.monotonic() < end:
            path, body = request_of(chance)
            found.append((path, body, http.post(path, json=body).raise_for_status().json()))
    return found


def differs(found, alone):
    """True if a reply is not that of the same request alone."""
    if "choices" in alone:
        ours, own = ([(each["text"], each.get("attention")) for each in reply["choices"]] for reply in (found, alone))
        return found["usage"] != alone["usage"] or not near(ours, own)
    if found["labels"] != alone["labels"]:
        return True
    if alone.get("layers"):
        return not near(found["layers"], alone["layers"])
    ours, own = ({each["id"]: each["logit"] for each in reply["predictions"][0]["top"]} for reply in (found, alone))
    return ours.keys() != own.keys() or not near(ours, own, BOUND * max(map(abs, own.values())))


def near(found, expected, bound=BOUND):
    """True if all numbers are within the bound, and all else is equal."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(near(found[name], expected[name], bound) for name in expected)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(near, found, expected, [bound] * len(found)))
    return abs(found - expected) <= bound if isinstance(expected, float) else found == expected


def test_every_reply_of_many_callers_is_that_of_its_request_alone(server):
    with ThreadPoolExecutor(CALLERS) as callers:
        requests = [callers.submit(ask_for, server, seed, SECONDS) for seed in range(CALLERS)]
        replies = [each for one in requests for each in one.result()]
        joined = [reply["ran"]["joined"] for path, _, reply in replies if "ran" in reply]
        assert len(replies) > SECONDS
        assert max(joined) > 1

        def wrong(one):
            path, body, found = one
            alone = httpx.post(f"{server}{path}", json=body | {"alone": True}, timeout=120).raise_for_status().json()
            return (path, body, found, alone) if differs(found, alone) else None

        other = [each for each in callers.map(wrong, replies) if each is not None]
    assert not other, f"{len(other)} of {len(replies)} replies differ from those of the same request alone: {other[0]}"
