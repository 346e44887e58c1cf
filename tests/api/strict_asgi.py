"""A middleware that holds an application to the ASGI specification, and its start in a process of its own.

Every message goes through pickle, as in servers that hand messages to other processes, and is checked by the
specification (asgi.readthedocs.io, HTTP and WebSocket 2.3): bodies are bytes, header names are lower case, and nothing
is sent after the end.
"""

import pickle
import sys

HTTP_END, OPEN, CLOSED = "http.response.body", "websocket.accept", "websocket.close"


def strict(app):
    """Return the application behind the checks. A message that breaks a rule raises AssertionError in ``send``."""

    async def checked(scope, receive, send):
        copied = {name: value for name, value in scope.items() if name not in {"app", "router", "extensions"}}
        scope = pickle.loads(pickle.dumps(copied))  # noqa: S301 - made a line above
        state = {"began": False, "ended": False}

        async def strict_receive():
            return pickle.loads(pickle.dumps(await receive()))  # noqa: S301 - made here

        async def strict_send(message):
            message = pickle.loads(pickle.dumps(message))  # noqa: S301 - made here
            check(message, state)
            await send(message)

        await app(scope, strict_receive, strict_send)
        assert scope["type"] != "http" or state["ended"], "the response never ended"

    return checked


def check(message, state):
    """Raise AssertionError for a message that the specification does not allow after those before it."""
    kind = message["type"]
    if kind in {"http.response.start", "websocket.http.response.start"}:
        assert not state["began"]
        assert type(message["status"]) is int
        state["began"] = True
    elif kind in {HTTP_END, "websocket.http.response.body"}:
        assert state["began"]
        assert not state["ended"], "a body after the end"
        assert type(message.get("body", b"")) is bytes, f"a body of {type(message['body'])}"
        assert type(message.get("more_body", False)) is bool
        state["ended"] = not message.get("more_body", False)
    elif kind == OPEN:
        assert not state["began"]
        state["began"] = True
    elif kind == "websocket.send":
        assert state["began"]
        given = [name for name in ("text", "bytes") if message.get(name) is not None]
        assert len(given) == 1
        assert type(message[given[0]]) is {"text": str, "bytes": bytes}[given[0]]
    else:
        assert kind in {CLOSED, "lifespan.startup.complete", "lifespan.shutdown.complete", "lifespan.startup.failed"}, (
            kind
        )
    for name, value in message.get("headers", ()):
        assert type(name) is type(value) is bytes
        assert name == name.lower()
        assert not {b"\r"[0], b"\n"[0]} & {*name, *value}


def strict_app():
    """Return the application of the environment's settings, ready when its start ends, behind the checks."""
    from attention_service.api.app import create_app

    return strict(create_app(wait_until_ready=True))


def run(server, port):
    """Run the application under a server by its name, until the process is ended."""
    if server == "uvicorn":
        import uvicorn

        uvicorn.run("tests.api.strict_asgi:strict_app", factory=True, port=port, log_level="warning")
    elif server == "hypercorn":
        import asyncio

        from hypercorn.asyncio import serve
        from hypercorn.config import Config

        config = Config()
        config.bind = [f"127.0.0.1:{port}"]
        asyncio.run(serve(strict_app(), config))
    else:
        from granian import Granian

        Granian(
            "tests.api.strict_asgi:strict_app", factory=True, port=port, interface="asgi", websockets=True,
            log_level="warning",
        ).serve()  # fmt: skip


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]))
