"""The users of a soak: each does operations at random, over HTTP, and checks every answer.

An answer with a status that its operation does not allow, or with wrong numbers, is a fault.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import httpx
import numpy as np

from attention_contract import wire
from attention_contract.operations import OPERATIONS
from tools.fuzz.seeds import bend

WIDTH, HEADS, LONGEST = 64, 4, 600
CAUSAL = {"masks": [{"name": "causal"}], "position": {"name": "rope"}}
CONFIG = {"d_model": WIDTH, "num_heads": HEADS, "num_kv_heads": 2, "spec": CAUSAL}
SHARED = "soak.shared"
"""A module that every user computes with, and nobody changes."""
PROMPT = 75 * "The river bends. "
TOLERANCE = 1e-4
_OF_MODELS = "/v1/models", "/v1/chat", "/v1/completions", "/v1/embeddings", "/v1/audio"
BUSY = {429, 503}
"""Statuses of an operation that may be refused because others ask for much at the same time."""
GONE = {404, 410}
"""Statuses of an operation on a session that may have been evicted."""
ATTACKS = [
    b"GET / HTTP/1.1\r\n", b"POST /v1/attention/forward HTTP/1.1\r\ncontent-length: 100000\r\n\r\n{", b"\x16\x03\x01\0",
    b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", b"GET / HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
]  # fmt: skip
"""What is sent on a connection that is then left."""


class FaultError(AssertionError):
    """An answer that is wrong."""


class Walker:
    """One user: a module and a session of its own, and the inputs of the session's tokens."""

    def __init__(self, http: httpx.AsyncClient, seed: int, counts: Counter[tuple[str, int]]) -> None:
        self.http, self.counts = http, counts
        self.rng, self.random = np.random.default_rng(seed), random.Random(seed)
        self.name, self.session = f"soak.{seed}", ""
        self.weight = np.zeros(0)
        self.steps = 0
        self.tokens = np.zeros((1, 0, WIDTH), np.float32)
        self.examples = [
            each
            for each in OPERATIONS
            if each.example is not None and each.method == "POST" and not each.path.startswith(_OF_MODELS)
        ]
        """Those of the whole models are left out: ``leave_model`` asks one."""
        steps = [self.step] * 12 + [
            self.fork,
            self.truncate,
            self.reorder,
            self.session_gradients,
            self.renew,
            self.cancel,
        ]
        plain = [self.forward] * 6 + [self.weights] * 3 + [self.gradients] * 2 + [self.cost, self.look]
        others = [self.replace, self.remake, *[self.bad_input] * 4, *[self.abort] * 2, self.attack, self.leave_model]
        self.moves: list[Callable[[], Awaitable[None]]] = [*steps, *plain, *others]

    async def walk(self, until: Callable[[], bool]) -> None:
        """Do operations at random, and end the session and the module."""
        await self.remake()
        await self.renew()
        while not until():
            await self.random.choice(self.moves)()
        await self.ask("delete_session", "DELETE", f"/v1/sessions/{self.session}", {204} | GONE)
        await self.ask("delete_module", "DELETE", f"/v1/modules/{self.name}", {204})

    # ── asking ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def ask(
        self, kind: str, method: str, path: str, allowed: set[int], body: Any = None
    ) -> dict[str, Any] | None:
        """Return the reply; None for an allowed refusal."""
        content = None if body is None else json.dumps(body, default=lambda x: x.tolist()).encode()
        headers = {} if content is None else {"content-type": wire.JSON}
        answer = await self.http.request(method, path, content=content, headers=headers)
        self.counts[kind, answer.status_code] += 1
        if answer.status_code not in allowed | BUSY:
            raise FaultError(f"{kind}: {method} {path} gave {answer.status_code}: {answer.text[:300]}")
        if answer.status_code in BUSY:
            await asyncio.sleep(0.05)
        return answer.json() if answer.status_code in {200, 201} else None

    def numbers(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(np.float32)

    def check(self, kind: str, found: Any, expected: Any) -> None:
        """Raise FaultError unless the numbers agree."""
        found, expected = np.asarray(found), np.asarray(expected)
        if found.shape != expected.shape:
            raise FaultError(f"{kind}: the shape is {found.shape}; expected {expected.shape}")
        if not np.allclose(found, expected, atol=TOLERANCE, rtol=TOLERANCE):
            raise FaultError(f"{kind}: numbers of shape {found.shape} differ by {np.abs(found - expected).max():.3g}")

    # ── one request ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def forward(self) -> None:
        """Compute one input in two forms, JSON and alone as safetensors: the numbers are the same."""
        x = self.numbers(self.random.choice([1, 7, 64, 200]), WIDTH)
        reply = await self.ask("forward", "POST", f"/v1/modules/{SHARED}/forward", {200}, {"query": x})
        if reply is not None and self.random.random() < 0.2:
            text = {"query": x, "kernel": "materialized"}
            again = await self.ask("forward", "POST", f"/v1/modules/{SHARED}/forward", {200}, text)
            if again is not None:
                self.check("forward", again["output"], reply["output"])

    async def weights(self) -> None:
        """Ask for weights: each row sums to one."""
        body = {"query": self.numbers(self.random.choice([2, 40]), WIDTH), "return_weights": True}
        reply = await self.ask("weights", "POST", f"/v1/modules/{SHARED}/weights", {200}, body)
        if reply is not None:
            sums = np.sum(reply["weights"], -1)
            self.check("weights", sums, np.ones_like(sums))

    async def gradients(self) -> None:
        """Differentiate: a gradient has the shape of its input."""
        x = self.numbers(self.random.choice([2, 32]), WIDTH)
        body = {"query": x, "wrt": ["query", "parameters"]}
        reply = await self.ask("gradients", "POST", f"/v1/modules/{SHARED}/gradients", {200}, body)
        if reply is not None and np.shape(reply["gradients"]["query"]) != x.shape:
            raise FaultError("gradients: another shape than the input's")

    async def cost(self) -> None:
        """Ask for a cost."""
        body = {"shape": {"queries": self.random.randint(1, 2000)}}
        await self.ask("complexity", "POST", f"/v1/modules/{SHARED}/complexity", {200}, body)

    async def look(self) -> None:
        """Read a list, the health or the metrics."""
        path = self.random.choice(["/v1", "/v1/modules", "/v1/sessions", "/v1/variants", "/health/live", "/metrics"])
        answer = await self.http.get(path)
        self.counts["look", answer.status_code] += 1
        if answer.status_code not in {200} | BUSY:
            raise FaultError(f"look: {path} gave {answer.status_code}")

    # ── modules ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def parameters(self) -> dict[str, np.ndarray]:
        self.weight = self.numbers(8, 8)
        return {f"{role}_proj.weight": self.weight for role in "qkvo"}

    async def remake(self) -> None:
        """Delete the own module and create it anew."""
        await self.ask("delete_module", "DELETE", f"/v1/modules/{self.name}", {204, 404})
        config = {"d_model": 8, "num_heads": 2, "bias": False}
        body = {"name": self.name, "config": config, "parameters": self.parameters()}
        while await self.ask("create_module", "POST", "/v1/modules", {201}, body) is None:
            await asyncio.sleep(0.1)

    async def replace(self) -> None:
        """Replace the own module's parameters and read one back."""
        path, before = f"/v1/modules/{self.name}/parameters", self.weight
        if await self.ask("replace_parameters", "PUT", path, {200}, {"parameters": self.parameters()}) is None:
            self.weight = before
        reply = await self.ask("get_parameter", "GET", f"{path}/q_proj.weight", {200})
        if reply is not None and not np.array_equal(np.float32(reply["value"]), self.weight):
            raise FaultError("replace_parameters: an acknowledged parameter is another")

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def of_session(self, kind: str, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Ask the own session; open another if it is gone."""
        reply = await self.ask(kind, "POST", f"/v1/sessions/{self.session}/{path}", {200, 201} | GONE, body)
        if reply is None:
            await self.renew()
        return reply

    async def renew(self) -> None:
        """End the session, or leave it to expire, and open another."""
        if self.session and self.random.random() < 0.8:
            await self.ask("delete_session", "DELETE", f"/v1/sessions/{self.session}", {204} | GONE)
        self.tokens = self.tokens[:1, :0]
        while (opened := await self.ask("open_session", "POST", f"/v1/modules/{SHARED}/sessions", {201}, {})) is None:
            await asyncio.sleep(0.1)
        self.session = opened["session"]

    async def step(self) -> None:
        """Step; now and then compare with an uncached pass."""
        if self.tokens.shape[1] > LONGEST:
            await self.renew()
        x = self.numbers(len(self.tokens), 1 if self.random.random() < 0.9 else self.random.randint(2, 100), WIDTH)
        reply = await self.of_session("step", "step", {"query": x, "at": self.tokens.shape[1]})
        if reply is None:
            return
        self.tokens = np.concatenate([self.tokens, x], 1)
        if self.random.random() < 0.02:
            body = {"query": self.tokens}
            whole = await self.ask("forward", "POST", f"/v1/modules/{SHARED}/forward", {200}, body)
            if whole is not None:
                self.check("step", reply["output"], np.asarray(whole["output"])[:, -x.shape[1] :])

    async def cancel(self) -> None:
        """Leave in the middle of a step and ask for it again, by its name: it counts once."""
        x = self.numbers(len(self.tokens), self.random.choice([1, 100]), WIDTH)
        self.steps += 1
        body = {"query": x, "at": self.tokens.shape[1], "step": str(self.steps)}
        path = f"/v1/sessions/{self.session}/step"
        try:
            async with asyncio.timeout(self.random.choice([1e-3, 4e-3, 0.02])):
                await self.ask("step", "POST", path, {200} | GONE, body)
        except TimeoutError:
            self.counts["cancelled step", 0] += 1
        if await self.of_session("step", "step", body) is not None:
            self.tokens = np.concatenate([self.tokens, x], 1)

    async def fork(self) -> None:
        """Go on in a copy, and end the former session."""
        former = self.session
        reply = await self.of_session("fork", "fork", {})
        if reply is not None:
            self.session = reply["session"]
            await self.ask("delete_session", "DELETE", f"/v1/sessions/{former}", {204} | GONE)

    async def truncate(self) -> None:
        """Forget the last tokens."""
        length = self.random.randint(0, self.tokens.shape[1])
        if await self.of_session("truncate", "truncate", {"length": length}) is not None:
            self.tokens = self.tokens[:, :length]

    async def reorder(self) -> None:
        """Let sequences continue others."""
        rows = self.rng.integers(0, len(self.tokens), self.random.randint(1, 3)).tolist()
        if await self.of_session("reorder", "reorder", {"rows": rows}) is not None:
            self.tokens = self.tokens[rows]

    async def session_gradients(self) -> None:
        """Differentiate over the past."""
        body = {"query": self.numbers(len(self.tokens), 2, WIDTH), "wrt": ["query"]}
        await self.of_session("session_gradients", "gradients", body)

    # ── bad callers ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def bad_input(self) -> None:
        """Send a sound request with some parts replaced, to a module that is not there if the request names one."""
        operation = self.random.choice(self.examples)
        body = bend(json.dumps(operation.example).encode(), self.random) or b"{"
        name = self.random.choice(["soak.none", SHARED])
        path = operation.path.format(name=name, id="7-1")
        if operation.name in {"create_module", "import_module", "create_recording", "open_session"}:
            body = body[: self.random.randint(0, len(body) - 1)]
        answer = await self.http.post(path, content=body, headers={"content-type": wire.JSON})
        self.counts["bad_input", answer.status_code] += 1
        if answer.status_code >= 500 and answer.status_code not in {503, 507}:
            raise FaultError(f"bad_input: {path} gave {answer.status_code} for {body[:300]!r}")

    async def abort(self) -> None:
        """Leave in the middle of a long computation."""
        body = {"query": self.numbers(700, WIDTH), "return": ["output", "weights"]}
        pending = self.ask("abort", "POST", f"/v1/modules/{SHARED}/forward", {200}, body)
        try:
            await asyncio.wait_for(pending, self.random.choice([1e-3, 0.01, 0.05]))
        except TimeoutError:
            self.counts["abort", 0] += 1

    async def leave_model(self) -> None:
        """Leave a whole model, most often while it prepares the request; or let its deadline pass."""
        body = {"model": "tiny", "prompt": [PROMPT] * 60, "max_tokens": 2}
        seconds = self.random.choice([0.01, 0.03, 0.05, 0.1, 0.3])
        headers = {"prefer": f"wait={seconds}"} if self.random.random() < 0.3 else {}
        try:
            async with asyncio.timeout(None if headers else seconds):
                answer = await self.http.post("/v1/completions", json=body, headers=headers)
        except TimeoutError:
            self.counts["leave_model", 0] += 1
            return
        self.counts["leave_model", answer.status_code] += 1
        if answer.status_code not in {200} | BUSY:
            raise FaultError(f"leave_model: {answer.status_code}: {answer.text[:300]}")

    async def attack(self) -> None:
        """Send a part of a request, or what is none, and leave."""
        url = self.http.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(self.random.choice(ATTACKS))
        with suppress(TimeoutError, ConnectionError):
            await asyncio.wait_for(reader.read(100), 0.02)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        self.counts["attack", 0] += 1
