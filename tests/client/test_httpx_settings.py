"""The settings of httpx: those of a caller's httpx client, of a transport, and of the environment."""

import asyncio
from operator import attrgetter

import httpx
import pytest

from attention_client import AsyncClient, Client, ConnectionFailed, DeadlineExceeded, UnexpectedReply
from tests.client.service import METHODS, URL, Played, X, both, reply_of
from tests.client.tcp import listening, read_request, stubborn


def through(kind, ask, *, client=None, **options):
    """Return what ``ask`` gives with a client of this kind through an httpx client with these options."""

    async def awaited():
        async with httpx.AsyncClient(**options) as http, AsyncClient(http=http, **(client or {})) as mine:
            return await ask(mine)

    if kind == "async":
        return asyncio.run(awaited())
    with httpx.Client(**options) as http, Client(http=http, **(client or {})) as mine:
        return ask(mine)


def own(kind, url, *names):
    """Call these operations one after the other over one client that has its own httpx client."""

    async def ask(client):
        return [await reply_of(attrgetter(METHODS[name])(client)()) for name in names]

    return both(kind, url, ask)


# ── an httpx client of the caller's ──────────────────────────────────────────────────────────────────────────────────


def test_headers_authentication_cookies_and_base_url_of_an_httpx_client_are_sent(kind, played):
    played.first = [httpx.Response(204)]
    through(
        kind, lambda client: client.modules.delete("demo"), transport=played.transport, base_url=f"{URL}/prefix",
        headers={"x-mine": "1"}, auth=("user", "secret"), cookies={"a": "b"}, params={"key": "k"},
    )  # fmt: skip
    sent = played.requests[0]
    assert str(sent.url) == f"{URL}/prefix/v1/modules/demo?key=k"
    assert sent.headers["x-mine"] == "1"
    assert sent.headers["authorization"].startswith("Basic ")
    assert sent.headers["cookie"] == "a=b"


def test_hooks_see_what_is_sent_and_received(kind, played):
    seen = []

    async def awaited_hook(message):
        seen.append(type(message))

    hook = awaited_hook if kind == "async" else lambda message: seen.append(type(message))
    hooks = {"request": [hook], "response": [hook]}
    through(kind, lambda client: client.server.info(), transport=played.transport, base_url=URL, event_hooks=hooks)
    assert seen == [httpx.Request, httpx.Response]


def test_an_authentication_that_asks_twice_sends_the_body_twice(kind):
    challenge = {"www-authenticate": 'Digest realm="r", nonce="n", qop="auth", algorithm=MD5'}
    played = Played(httpx.Response(401, headers=challenge))
    through(
        kind, lambda client: client.forward("demo", X), transport=played.transport, base_url=URL,
        auth=httpx.DigestAuth("user", "secret"),
    )  # fmt: skip
    first, second = played.requests
    assert second.headers["authorization"].startswith("Digest ")
    assert first.content == second.content


def test_redirects_are_followed_where_the_httpx_client_follows_them(kind):
    moved = httpx.Response(307, headers={"location": "/elsewhere/v1"})
    options = {"base_url": URL, "transport": Played(moved).transport}
    with pytest.raises(UnexpectedReply, match="points to /elsewhere/v1"):
        through(kind, lambda client: client.server.info(), **options)
    followed = Played(moved, httpx.Response(404))
    with pytest.raises(Exception, match="/elsewhere/v1 answered 404"):
        through(
            kind, lambda client: client.server.info(), base_url=URL, transport=followed.transport,
            follow_redirects=True,
        )  # fmt: skip


def test_redirects_without_end_are_an_unexpected_reply(kind):
    circle = Played(*[httpx.Response(307, headers={"location": "/v1"})] * 30)
    with pytest.raises(UnexpectedReply, match="redirects without end") as caught:
        through(
            kind, lambda client: client.server.info(), base_url=URL, transport=circle.transport, follow_redirects=True
        )
    assert "answered" not in caught.value.facts


@pytest.mark.sampled
@pytest.mark.parametrize("timeout", [httpx.Timeout(None, read=0.2), httpx.Timeout(0.4)])
def test_timeouts_of_an_httpx_client_hold_before_the_deadline(kind, timeout):
    def silent(connection, over):
        read_request(connection)
        over.wait(5)

    with (
        stubborn(silent) as url,
        pytest.raises(DeadlineExceeded, match="the httpx client's timeout has passed while wai"),
    ):
        through(kind, lambda client: client.server.info(), base_url=url, timeout=timeout)


def test_a_timeout_while_connecting_is_tried_again(kind):
    played = Played(httpx.ConnectTimeout("slow"), httpx.PoolTimeout("full"))
    through(kind, lambda client: client.server.info(), base_url=URL, transport=played.transport)
    assert len(played.requests) == 3
    late = Played(*[httpx.ConnectTimeout("slow")] * 2)
    with pytest.raises(ConnectionFailed, match="while connecting") as caught:
        through(
            kind, lambda client: client.server.info(), base_url=URL, transport=late.transport, client={"retries": 1}
        )
    assert caught.value.facts["sent"] is False


def test_a_base_url_beside_an_httpx_client_is_the_servers(kind, played):
    played.first = [httpx.Response(204)] * 2
    ask = {"client": {"base_url": f"{URL}/there/"}, "transport": played.transport}
    through(kind, lambda client: client.modules.delete("demo"), **ask)
    through(kind, lambda client: client.modules.delete("demo"), base_url="http://elsewhere.test", **ask)
    assert [str(sent.url) for sent in played.requests] == [f"{URL}/there/v1/modules/demo"] * 2


def test_the_default_url_serves_an_httpx_client_without_one(kind, played):
    through(kind, lambda client: client.server.info(), transport=played.transport)
    assert str(played.requests[0].url) == "http://127.0.0.1:8000/v1"


def test_an_httpx_client_stays_open(played):
    with httpx.Client(base_url=URL, transport=played.transport) as http:
        Client(http=http).close()
        assert Client(http=http).server.info().name == "attention-service"


@pytest.mark.parametrize("given", [{"headers": {"a": "b"}}, {"transport": httpx.MockTransport(print)}])
def test_what_is_an_httpx_clients_own_to_set_is_refused_beside_it(given):
    name = next(iter(given))
    with httpx.Client() as http, pytest.raises(ValueError, match=f"{name}: cannot be combined with http"):
        Client(http=http, **given)


# ── a client of its own ───────────────────────────────────────────────────────────────────────────────────────────────


def test_cookies_that_the_server_sets_come_back(kind):
    with listening() as service:
        service.extra = {"set-cookie": "lane=7; Path=/"}
        own(kind, service.url, "server_info", "health_live", "server_info")
        assert [request.headers.get("cookie") for request in service.requests] == [None, "lane=7", "lane=7"]


def test_a_user_in_the_url_is_authenticated(kind):
    with listening() as service:
        own(kind, service.url.replace("://", "://user:secret@"), "server_info")
        assert service.requests[0].headers["authorization"].startswith("Basic ")


def test_compressed_answers_are_unpacked(kind):
    import gzip

    body = gzip.compress(b'{"status":"live","modules":1}')

    def compressed(connection, over):
        read_request(connection)
        connection.sendall(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-encoding: gzip\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )

    with stubborn(compressed) as url:
        assert own(kind, url, "health_live")[0].modules == 1


def test_a_closed_client_sends_nothing(kind):
    with listening() as service:
        if kind == "sync":
            with Client(service.url) as client:
                client.server.info()
            with pytest.raises(RuntimeError, match="closed"):
                client.server.info()
        else:

            async def awaited():
                async with AsyncClient(service.url) as client:
                    await client.server.info()
                with pytest.raises(RuntimeError, match="closed"):
                    await client.server.info()

            asyncio.run(awaited())
        assert len(service.requests) == 1


# ── proxies ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "all_proxy"])
def test_the_environment_names_a_proxy_and_hosts_that_are_exempt(kind, variable, monkeypatch):
    seen = []

    def proxy(connection, over):
        seen.append(read_request(connection).partition(b"\r\n")[0])
        connection.sendall(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")

    with stubborn(proxy) as url, listening() as service:
        monkeypatch.setenv(variable, url)
        with pytest.raises(Exception, match="404"):
            own(kind, URL, "server_info")
        assert seen == [f"GET {URL}/v1 HTTP/1.1".encode()]
        monkeypatch.setenv("no_proxy", "localhost")
        own(kind, service.url, "server_info")
        assert len(service.requests) == len(seen) == 1
