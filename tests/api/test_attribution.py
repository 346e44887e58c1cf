"""Attributions over HTTP, against autograd through attention written out in float64."""

from itertools import product

import numpy as np
import pytest
import torch

from tests.api.talk import post, refuse

METHODS = ["gradient_attention", "integrated", "relevance", "norm", "head_importance"]
HEADS, KV_HEADS, WIDTH, D = 4, 2, 3, 10
REAL = (6, 4)
EDITS = [
    {"tap": "scores", "heads": [1], "keys": [0], "scale": 2.0},
    {"tap": "v", "heads": [1], "scale": 0.5},
    {"tap": "weights", "heads": [2], "keys": [1], "set": 0.0, "renormalize": True},
    {"tap": "context", "heads": [3], "queries": [2], "scale": 3.0},
    {"tap": "output", "queries": [1], "set": 0.25},
]


class Reference:
    """One module in float64, every step a tensor with a gradient."""

    def __init__(self, parameters, edited):
        self.parameters = {name: torch.tensor(x, dtype=torch.float64) for name, x in parameters.items()}
        self.edited = edited

    def project(self, role, x, heads):
        y = x @ self.parameters[f"{role}_proj.weight"].T + self.parameters[f"{role}_proj.bias"]
        return y.unflatten(-1, (heads, WIDTH)).transpose(1, 2)

    def weights_and_values(self, x, real):
        """The weights after their edits, and the values of each query head."""
        q = self.project("q", x, HEADS)
        k, v = (self.project(role, x, KV_HEADS).repeat_interleave(HEADS // KV_HEADS, 1) for role in "kv")
        scores = q @ k.mT / WIDTH**0.5
        if self.edited:
            scores = scores.clone()
            scores[:, 1, :, 0] *= 2
            v = v.clone()
            v[:, 2:] *= 0.5  # key/value head 1
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1) | ~real[:, None, None]
        a = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        if self.edited:
            a = a.clone()
            a[:, 2, :, 1] = 0
            a[:, 2] /= a[:, 2].sum(-1, keepdim=True)
        return a.detach(), v.detach()

    def output(self, a, v, gates):
        """The output of these weights, each head's context times its gate."""
        context = a @ v
        if self.edited:
            context = torch.cat([context[:, :3], context[:, 3:] * (1 + 2.0 * (torch.arange(6) == 2)[:, None])], 1)
        merged = (context * gates[:, :, None, None]).transpose(1, 2).flatten(2)
        output = merged @ self.parameters["o_proj.weight"].T + self.parameters["o_proj.bias"]
        return torch.where((torch.arange(6) == 1)[:, None], 0.25, output) if self.edited else output

    def attributions(self, x, real, loss, steps):
        a, v = self.weights_and_values(x, real)
        gates = torch.ones(len(x), HEADS, dtype=torch.float64)
        alone = a.clone().requires_grad_()
        of_gates = gates.clone().requires_grad_()
        of_a, of_gate = torch.autograd.grad(loss(self.output(alone, v, of_gates)).sum(), [alone, of_gates])
        mean = torch.zeros_like(a)
        for k in range(1, steps + 1):
            point = (a * k / steps).requires_grad_()
            mean += torch.autograd.grad(loss(self.output(point, v, gates)).sum(), point)[0] / steps
        added = torch.einsum("bhqk,bhkv,hvd->bhqkd", a, v, self.parameters["o_proj.weight"].T.unflatten(0, (HEADS, -1)))
        change = loss(self.output(a, v, gates)) - loss(self.output(torch.zeros_like(a), v, gates))
        return {
            "gradient_attention": a * of_a,
            "integrated": a * mean,
            "relevance": (a * of_a).clamp(min=0).mean(1),
            "norm": added.norm(dim=-1),
            "norm_of_sum": added.sum(1).norm(dim=-1),
            "head_importance": of_gate.abs(),
        }, change


@pytest.fixture(scope="module")
def module(client):
    rng = np.random.default_rng(3)
    config = {
        "d_model": D, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": WIDTH, "dtype": "float64",
        "spec": {"masks": [{"name": "causal"}]},
    }  # fmt: skip
    shapes = {"q": (12, D), "k": (6, D), "v": (6, D), "o": (D, 12)}
    parameters = {f"{role}_proj.weight": rng.normal(size=shape) for role, shape in shapes.items()}
    parameters |= {f"{role}_proj.bias": rng.normal(size=shape[:1]) for role, shape in shapes.items()}
    client.modules.create("attributed", config, parameters=parameters)
    yield "attributed", parameters
    client.modules.delete("attributed")


@pytest.mark.parametrize("read_out", [False, True])
@pytest.mark.parametrize("edited", [False, True])
def test_every_method_agrees_with_autograd_in_float64(client, module, rng, edited, read_out):
    name, parameters = module
    x, steps = rng.normal(size=(2, 6, D)), 5
    real = torch.arange(6) < torch.tensor(REAL)[:, None]
    upstream, weight, bias = rng.normal(size=(2, 6, D)), rng.normal(size=(7, D)), rng.normal(size=7)
    targets = np.array([[0, 3, -1, 6, 2, 2], [1, 1, 5, 4, -1, -1]])

    def loss(output):
        if not read_out:
            return (output * torch.tensor(upstream)).sum((1, 2))
        found = (output @ torch.tensor(weight).T + torch.tensor(bias)).log_softmax(-1)
        chosen = found.gather(-1, torch.tensor(targets).clamp(min=0)[..., None])[..., 0]
        return (chosen * torch.tensor(targets >= 0)).sum(1)

    body = {"readout": {"weight": weight, "bias": bias, "targets": targets}} if read_out else {"upstream": upstream}
    reference = Reference(parameters, edited)
    expected, change = reference.attributions(torch.tensor(x), real, loss, steps)
    reply = client.attribution(
        name, x, key_lengths=np.array(REAL), methods=METHODS, steps=steps, edits=EDITS if edited else (), **body
    )
    for method, values in expected.items():
        np.testing.assert_allclose(getattr(reply, method), values, atol=1e-12, err_msg=method)
    np.testing.assert_allclose(reply.completeness.expected, change, atol=1e-12)
    np.testing.assert_allclose(reply.completeness.attributed, expected["integrated"].sum((1, 2, 3)), atol=1e-12)
    np.testing.assert_allclose(
        reply.completeness.gap, reply.completeness.attributed - reply.completeness.expected, atol=1e-12
    )


def test_the_gap_of_the_path_shrinks_with_its_steps(http, module, rng):
    name, _ = module
    body = {"query": rng.normal(size=(1, 6, D)).tolist(), "methods": ["integrated"]}
    body["readout"] = {"weight": rng.normal(size=(3, D)).tolist(), "targets": [[0, 1, 2, 0, 1, 2]]}
    gaps = []
    for steps in (8, 64):
        found = post(http, f"/v1/modules/{name}/attribution", **body, steps=steps)
        assert np.sum(found["integrated"]) == pytest.approx(found["completeness"]["attributed"][0], abs=1e-9)
        gaps.append(abs(found["completeness"]["gap"][0]))
    assert 4 < gaps[0] / gaps[1] < 16  # a sum at the right ends of the steps has an error of first order


def test_a_selection_and_a_comparison_are_parts_of_the_whole(http, rng):
    q, k, v = rng.normal(size=(3, 2, 3, 5, 4))
    body = {"query": q.tolist(), "key": k.tolist(), "value": v.tolist(), "methods": METHODS}
    edits = [{"tap": "weights", "heads": [1], "set": 0.25}, {"tap": "v", "heads": [2], "scale": 2.0}]
    path = "/v1/attention/attribution"
    plain = post(http, path, **body)
    edited = post(http, path, **body, edits=edits, compare="unedited")
    some = {"heads": [2, 0], "queries": [4]}
    few = post(http, path, **body, select=some)
    few_edited = post(http, path, **body, select=some, edits=edits)
    for (part, whole), name in product(
        [(few, plain), (few_edited, edited)], ["gradient_attention", "integrated", "norm"]
    ):
        np.testing.assert_allclose(part[name], np.array(whole[name])[:, [2, 0]][:, :, [4]], atol=1e-6, err_msg=name)
    for name in (*METHODS, "norm_of_sum"):
        change = np.subtract(edited[name], plain[name])
        np.testing.assert_allclose(edited["differences"][name], change, atol=1e-5, err_msg=name)
        assert np.abs(change).max() > 1e-3
    signed = np.array(plain["gradient_attention"])[:, [2, 0]][:, :, [4]]
    np.testing.assert_allclose(few["relevance"], signed.clip(min=0).mean(1), atol=1e-6)
    lengths = np.array(plain["norm"])  # the heads of raw attention lie side by side
    np.testing.assert_allclose(plain["norm_of_sum"], np.sqrt((lengths**2).sum(1)), atol=1e-5)
    assert few["head_importance"] == plain["head_importance"]


def test_global_projections_have_values_of_their_own(client, rng):
    masks = [{"name": "global_tokens", "positions": [0, 3], "projections": "separate"}]
    x = rng.normal(size=(1, 5, 8))
    client.modules.create(
        "attributed.global", {"d_model": 8, "num_heads": 2, "dtype": "float64", "spec": {"masks": masks}}, seed=1
    )
    reply = client.attribution("attributed.global", x, methods=["gradient_attention", "norm"])
    exact = client.gradients("attributed.global", x, wrt=["weights"], return_=["weights"])
    names = ("v_global.weight", "v_global.bias", "v_proj.weight", "v_proj.bias", "o_proj.weight")
    parameters = {name: client.modules.parameter("attributed.global", name).value for name in names}
    client.modules.delete("attributed.global")
    np.testing.assert_allclose(reply.gradient_attention, exact.weights * exact.gradients["weights"], atol=1e-12)
    for row in range(5):
        by = "global" if row in (0, 3) else "proj"
        v = x[0] @ parameters[f"v_{by}.weight"].T + parameters[f"v_{by}.bias"]
        for head in range(2):
            at = slice(head * 4, head * 4 + 4)
            lengths = np.linalg.norm(v[:, at] @ parameters["o_proj.weight"].T[at], axis=-1)
            np.testing.assert_allclose(reply.norm[0, head, row], exact.weights[0, head, row] * lengths, atol=1e-12)


def test_padding_that_is_not_finite_adds_nothing(http):
    query = [[1.0, 0.0], [0.0, 1.0], ["NaN", "Infinity"]]
    padded = post(
        http, "/v1/attention/attribution", query=query, key_lengths=2, methods=METHODS[:4], select={"queries": [0, 1]}
    )
    alone = post(http, "/v1/attention/attribution", query=query[:2], methods=METHODS[:4])
    for name in ("gradient_attention", "integrated", "relevance", "norm", "norm_of_sum"):
        np.testing.assert_allclose(np.array(padded[name])[:, :2], alone[name], atol=1e-6)
        assert not np.any(np.array(padded[name])[:, 2])


def test_a_session_attributes_to_its_past(client, module, rng):
    name, _ = module
    x = rng.normal(size=(1, 6, D))
    whole = client.attribution(name, x, methods=["gradient_attention", "norm"], select={"queries": [4, 5]})
    with client.sessions.open(name) as session:
        session.step(x[:, :4])
        reply = session.attribution(x[:, 4:], methods=["gradient_attention", "norm"])
    np.testing.assert_allclose(reply.gradient_attention, whole.gradient_attention, atol=1e-12)
    np.testing.assert_allclose(reply.norm_of_sum, whole.norm_of_sum, atol=1e-12)


READOUT = {"weight": [[1.0, 0.0], [0.0, 1.0]], "targets": [0, 1]}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"methods": ["saliency"]}, "methods.0", "invalid_request"),
        ({"methods": []}, "methods", "invalid_request"),
        ({"steps": 0}, "steps", "invalid_request"),
        ({"upstream": [[1.0, 1.0]]}, "upstream", "shape_mismatch"),
        ({"upstream": [[1.0, 1.0]] * 2, "readout": READOUT}, "upstream", "invalid_request"),
        ({"readout": READOUT | {"weight": [[1.0, 0.0, 0.0]]}}, "readout.weight", "shape_mismatch"),
        ({"readout": READOUT | {"bias": [1.0]}}, "readout.bias", "shape_mismatch"),
        ({"readout": READOUT | {"targets": [[0, 1]]}}, "readout.targets", "shape_mismatch"),
        ({"readout": READOUT | {"targets": [0, 2]}}, "readout.targets", "invalid_request"),
        ({"readout": READOUT | {"targets": [-2, 1]}}, "readout.targets", "invalid_request"),
        ({"select": {"queries": [2]}}, "select.queries", "invalid_request"),
        ({"edits": [{"tap": "weights", "heads": [1], "set": 0}]}, "edits.0.heads", "invalid_request"),
        ({"spec": {"method": {"name": "linear"}}}, "spec.method", "invalid_request"),
        ({"kernel": "fused"}, "kernel", "kernel_unsuitable"),
    ],
)  # fmt: skip
def test_bad_requests_name_the_field(http, fields, param, code):
    problem = refuse(http, "/v1/attention/attribution", query=[[1.0, 0], [0, 1]], **fields)
    assert (problem["status"], problem["param"], problem["code"]) == (422, param, code)
