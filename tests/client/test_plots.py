"""Pictures that clients ask for: the operation's own request, with another Accept and a query string."""

import pytest

from attention_client import AsyncClient, Client
from attention_contract.errors import InvalidRequest
from attention_contract.reply_names import Names
from attention_contract.schemas.weights import WeightsRequest
from tests.client.service import URL, Played, X, both


def test_a_plot_asks_for_the_picture_of_a_reply(kind):
    played = Played()

    def draw(client):
        plot = client.plot("png", view="head", head=1, theme="dark")
        return plot.of(client.weights, "demo", X, labels=["a", "b", "c"])

    picture = both(kind, URL, draw, transport=played.transport)
    assert (picture.media_type, picture.data) == ("image/png", b"drawn as image/png")
    (request,) = played.requests
    assert request.url.path == "/v1/modules/demo/weights"
    assert dict(request.url.params) == {"view": "head", "head": "1", "theme": "dark"}
    assert isinstance(played.payload, WeightsRequest)
    assert played.payload.labels == ["a", "b", "c"]


def test_a_reply_knows_the_names_in_its_request(kind):
    def ask(client):
        return client.weights("demo", X, labels=["the", "cat", "sat"], select={"heads": [5, 7], "queries": [2, 0, 1]})

    reply = both(kind, URL, ask, transport=Played().transport)
    assert reply.request_names == Names(
        "demo", ["the", "cat", "sat"], ["the", "cat", "sat"], rows=[2, 0, 1], heads=[5, 7]
    )
    html = reply._repr_html_()
    assert all(f'"{name}": {value}' in html for name, value in (
        ("columns", '["the", "cat", "sat"]'), ("rows", '["sat", "the", "cat"]'), ("names", '["H5", "H7"]'),
    ))  # fmt: skip
    own, given = reply.plot(view="lines"), reply.plot(view="lines", title="mine", labels=["a", "b", "c"])
    assert all(word in own.data for word in (b"demo", b"H5", b">cat<"))
    assert all(word in given.data for word in (b">mine<", b">b<"))
    assert b"demo" not in given.data


def test_other_calls_of_the_client_stay_as_they_are():
    played = Played()
    with Client(URL, transport=played.transport) as client:
        plot = client.plot()
        assert plot.of(client.attention.weights, X).media_type == "image/svg+xml"
        assert client.weights("demo", X).weights is not None
        assert plot.of(client.recordings.rollout, "0" * 32, method="flow").media_type == "image/svg+xml"
        assert client.raw(client.recordings.rollout, "0" * 32, method="flow").status == 200
        assert "view" not in played.requests[-1].url.params
        with pytest.raises(TypeError, match="gradients has no pictures"):
            plot.of(client.gradients, "demo", X)
        with pytest.raises(TypeError, match=r"client\.weights"):
            plot.of(len, X)
        assert len(played.requests) == 4


@pytest.mark.parametrize(
    ("arguments", "fields", "param"),
    [(["gif"], {}, "format"), ([], {"theme": "blue"}, "theme"), ([], {"width": 1}, "width"), ([], {"hue": 1}, "hue")],
)
@pytest.mark.parametrize("client", [Client(URL), AsyncClient(URL)])
def test_an_unknown_look_is_refused_before_it_is_sent(client, arguments, fields, param):
    with pytest.raises(InvalidRequest) as caught:
        client.plot(*arguments, **fields)
    assert caught.value.param == param
