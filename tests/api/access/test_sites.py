"""Host, Origin and Sec-Fetch-Site: pages of other sites are kept away, programs and the own page are not."""

import pytest

from attention_contract.errors import Forbidden, Misdirected
from attention_service.api.access.sites import Hosts, check_site, is_loopback

ELSEWHERE = b"https://elsewhere.test"
SAME = {b"host": b"box:8000"}
LINK = {b"sec-fetch-site": b"cross-site", b"sec-fetch-mode": b"navigate", b"sec-fetch-dest": b"document"}


def names(bound, *allowed, keys=False):
    hosts = Hosts(bound, allowed, keys=keys)

    def takes(host):
        try:
            hosts.check({b"host": host.encode()})
        except Misdirected:
            return False
        return True

    return takes


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "LOCALHOST", "127.0.0.1:1", "[::1]:8000", "localhost."]
)
def test_a_loopback_server_answers_to_its_own_names(host):
    assert names("127.0.0.1")(host)


@pytest.mark.parametrize(
    "host",
    [
        "evil.test",
        "evil.test:8000",
        "10.0.0.5",
        "localhost.evil.test",
        "",
        "127.0.0.1.evil.test",
        "[::1]evil",
        "[::1]evil:80",
        "[::1",
        "127.0.0.1:80@evil.example",
        "localhost:80:80",
        "localhost:x",
        "localhost/evil",
        "a@localhost",
    ],
)
def test_a_loopback_server_answers_to_no_other_name(host):
    assert not names("127.0.0.1")(host)


def test_a_server_on_every_interface_answers_to_addresses_and_with_keys_to_any_name():
    assert names("0.0.0.0")("10.0.0.5:8000")
    assert names("::")("[fe80::1]:8000")
    assert not names("0.0.0.0")("box.lab")
    assert names("0.0.0.0", keys=True)("box.lab")
    assert not names("0.0.0.0", "box.lab", keys=True)("evil.test")


def test_the_setting_names_further_hosts():
    takes = names("127.0.0.1", "box.lab", "*.team.test")
    assert takes("box.lab")
    assert takes("a.team.test:80")
    assert not takes("team.test")
    assert not takes("eviltean.test")
    assert names("127.0.0.1", "*")("anything")
    assert names("10.0.0.5")("10.0.0.5:8000")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        SAME,
        SAME | {b"origin": b"http://box:8000"},
        {b"sec-fetch-site": b"same-origin"},
        {b"sec-fetch-site": b"none"},
        LINK,
    ],
)
def test_the_own_page_a_link_and_programs_pass(headers):
    assert check_site("GET", "http", headers, ()) is None


@pytest.mark.parametrize("host", [b"box", b"box:443"])
def test_an_origin_is_that_of_the_connection_by_its_scheme_too(host):
    headers = {b"host": host, b"origin": b"https://box"}
    for scheme in ("https", "wss"):
        assert check_site("GET", scheme, headers, ()) is None
    for scheme in ("http", "ws"):
        with pytest.raises(Forbidden):
            check_site("GET", scheme, headers, ())


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("GET", SAME | {b"origin": ELSEWHERE}),
        ("GET", SAME | {b"origin": b"null"}),
        ("GET", SAME | {b"origin": b"http://box:9000"}),
        ("GET", SAME | {b"origin": b"http://box:8000.evil.test"}),
        ("GET", {b"origin": b""}),
        ("POST", {b"sec-fetch-site": b"cross-site"}),
        ("GET", {b"sec-fetch-site": b"same-site"}),
        ("GET", LINK | {b"sec-fetch-dest": b"iframe"}),
        ("GET", LINK | {b"sec-fetch-mode": b"no-cors"}),
        ("POST", LINK),
        ("POST", SAME | {b"origin": b"http://box:8000", b"sec-fetch-site": b"cross-site"}),
    ],
)
def test_pages_of_other_sites_do_not(method, headers):
    with pytest.raises(Forbidden) as caught:
        check_site(method, "http", headers, ("https://allowed.test",))
    assert caught.value.param == "Origin"


@pytest.mark.parametrize("scheme", ["ws", "wss"])
def test_a_stream_follows_no_link(scheme):
    with pytest.raises(Forbidden):
        check_site("GET", scheme, LINK, ())


def test_an_allowed_origin_passes():
    headers = SAME | {b"origin": b"https://allowed.test", b"sec-fetch-site": b"cross-site"}
    assert check_site("POST", "http", headers, ("https://allowed.test",)) == "https://allowed.test"
    assert check_site("POST", "http", SAME | {b"origin": ELSEWHERE}, ("*",)) == ELSEWHERE.decode()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_an_address_of_this_machine_is_loopback(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "box", ""])
def test_an_address_that_others_reach_is_not(host):
    assert not is_loopback(host)
