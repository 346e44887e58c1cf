"""The output of a layer's MLP is found by trial, whatever its parts are called and however its layer is made."""

import pytest
import torch
from torch import nn

from attention_service.models.loaded.mlp_outputs import find_layer_states
from attention_service.models.passes.points import Site, changing

WIDTH = 16


class Attention(nn.Module):
    """Mixes tokens, by fixed weights."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states):
        mixed = (
            torch.ones(hidden_states.shape[1], hidden_states.shape[1]).tril().softmax(-1).to(hidden_states)
            @ hidden_states
        )
        return self.project(mixed), None


def mlp():
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class Layer(nn.Module):
    """One layer, whose states are summed by ``way``."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.first, self.second, self.last = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.mixing, self.other, self.third = Attention(), mlp(), mlp()
        self.joined = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden_states):
        x = hidden_states
        if self.way == "parallel":
            y = self.first(x)
            return x + self.mixing(y)[0] + self.other(y)
        if self.way == "attention alone":
            return x + self.second(self.mixing(self.first(x))[0])
        if self.way == "joined":
            y = self.first(x)
            return x + self.joined(torch.cat([self.mixing(y)[0], self.other(y)], -1))
        if self.way == "around":
            x = x + 0.5 * self.third(x)
        middle = x + self.mixing(self.first(x))[0]
        if self.way == "scaled":
            return middle + 0.25 * self.other(self.second(middle))
        if self.way == "weighted":
            return 3.0 * middle + self.other(self.second(middle))
        if self.way == "behind a norm":
            return self.last(middle + self.other(middle))
        if self.way == "rows":
            rows = middle.reshape(-1, WIDTH)
            return (rows + self.other(self.second(rows))).view(middle.shape)
        if self.way == "two":
            middle = middle + self.third(middle)
        return middle + self.other(self.second(middle))


class Place:
    """What the search reads of a layer's attention."""

    channels_first, turn = False, 0

    def __init__(self, key, layer):
        self.key, self.layer, self.module = key, layer, layer.mixing

    def batch_first(self, change):
        return change


def stack(way, dtype=torch.float32):
    torch.manual_seed(3)
    return nn.Sequential(Layer(way), Layer(way)).requires_grad_(False).to(dtype)


def search(model, dtype=torch.float32):
    places = [Place(number, layer) for number, layer in enumerate(model)]
    states = torch.randn(1, 7, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = find_layer_states(places, [{"states": states}], lambda arguments: model(arguments["states"]), dtype)
    assert {each.width for each in found.values()} == {WIDTH}
    return states, {key: each.mlp for key, each in found.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["before norms", "parallel", "scaled", "weighted", "behind a norm", "rows"])
def test_the_output_is_what_the_layer_adds(way, dtype):
    model = stack(way, dtype)
    states, found = search(model, dtype)
    states = torch.cat([states, -states])  # of two texts, which the search has not seen
    seen = {}
    for number, layer in enumerate(model):
        assert isinstance(found[number], Site)
        assert found[number].module is layer.other
    with changing([(found[0], lambda state: seen.update(added=state.clone()))]):
        plain = model[0](states)
    with changing([(found[0], torch.zeros_like)]):
        without = model[0](states)
    with changing([(found[0], lambda state: state + 0.5)]):
        more = model[0](states)
    if way == "behind a norm":
        one, other = seen["added"] + 0.5, model[0].last
        middle = states + model[0].mixing(model[0].first(states))[0]
        torch.testing.assert_close(more, other(middle + one))
        return
    tolerance = 0.05 if dtype.itemsize == 2 else 2e-6
    torch.testing.assert_close(plain - without, seen["added"], atol=tolerance, rtol=0)
    torch.testing.assert_close(more - plain, torch.full_like(plain, 0.5), atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("attention alone", "adds nothing beside its attention"),
        ("joined", "no module of its layer returns what its mlp adds alone"),
        ("around", "adds the outputs of several modules beside its attention"),
        ("two", "adds the outputs of several modules beside its attention"),
    ],
)
def test_a_layer_without_an_mlp_of_its_own_says_why(way, reason):
    _, found = search(stack(way))
    assert all(reason in found[number] for number in range(2))


def test_an_attention_that_is_in_no_layer_has_no_mlp():
    layer = stack("parallel")[0]
    place = Place(0, layer)
    place.layer = place.module
    found = find_layer_states(
        [place], [{"states": torch.ones(1, 3, WIDTH)}], lambda given: layer(given["states"]), torch.float32
    )
    assert "no part of a layer" in found[0].mlp
