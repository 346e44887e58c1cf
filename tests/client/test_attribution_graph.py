"""Attribution graphs from paths: of a reply whose right graph is known, and of the model that ships."""

import json

import numpy as np
import pytest

from attention_client import Client, InvalidRequest
from attention_client.attribution_graph import attribution_graph
from attention_contract.schemas.analyses.model_effects import ModelEffects, ModelEffectsReply
from attention_contract.schemas.analyses.model_paths import PathEnd
from attention_contract.schemas.prompts import TokenLabelsReply
from tests.client.cli.command_line import invoke
from tests.conftest import live_server

pytestmark = pytest.mark.filterwarnings("ignore:os.fork")
NODE = {
    "node_id": str, "feature": int, "layer": str, "ctx_idx": int, "feature_type": str, "jsNodeId": str, "clerp": str,
    "token_prob": float, "is_target_logit": bool, "run_idx": int, "reverse_ctx_idx": int, "influence": float,
}  # fmt: skip
"""The fields and types that ``Node`` of circuit-tracer 0.5.0 (``frontend/graph_models.py``) has, and those that
``graph-schema.json`` of Neuronpedia requires."""


def check(graph):
    """Read a graph as strictly as both do: every field with its type, and every id that is named is that of a node."""
    assert graph.keys() == {"metadata", "qParams", "nodes", "links"}
    metadata = graph["metadata"]
    assert all(isinstance(metadata[name], str) for name in ("slug", "scan", "prompt"))
    assert all(isinstance(token, str) for token in metadata["prompt_tokens"])
    assert metadata["transcoder_list"] == []
    assert isinstance(metadata.get("node_threshold", 0.8), float)
    parameters = {"pinnedIds": list, "supernodes": list, "linkType": str, "clickedId": str, "sg_pos": str}
    assert {name: type(value) for name, value in graph["qParams"].items()} == parameters
    for node in graph["nodes"]:
        assert {name: type(node[name]) for name in NODE} == NODE
        assert 0 <= node["ctx_idx"] < len(metadata["prompt_tokens"])
        assert node["layer"] == "E" or int(node["layer"]) >= 0
    ids = [node["node_id"] for node in graph["nodes"]]
    assert len({*ids}) == len(ids)
    for link in graph["links"]:
        assert {name: type(value) for name, value in link.items()} == {"source": str, "target": str, "weight": float}
        assert {link["source"], link["target"]} <= {*ids}
    for node in graph["nodes"]:
        for name, listed in node.get("qk_tracing_results", {}).items():
            assert name in {"pair_wise_contributors", "top_q_marginal_contributors", "top_k_marginal_contributors"}
            assert all(source in ids and type(weight) is float for source, weight in listed)


def test_the_weights_of_a_known_reply_are_links_and_marginals():
    ends = {
        "from": [PathEnd(part="embeddings"), PathEnd(part="heads", layer=0, head=1), PathEnd(part="mlps", layer=0)],
        "to": [PathEnd(part="q", layer=1, head=0), PathEnd(part="v", layer=1, head=0), PathEnd(part="logits")],
    }
    heads = [PathEnd(part="heads", layer=1, head=head) for head in range(2)]
    value = [[0.5, -1.0, -3.0], [0.0, 0.25, np.nan], [-2.0, 0.0, 1.0], [np.nan] * 3, [np.nan, np.nan, -4.0]]
    reply = ModelEffectsReply.model_construct(
        labels=TokenLabelsReply(tokens=["a", " b"], ids=[3, 4], spans=[None, None]),
        swept={"from": [*ends["from"], *heads], "to": ends["to"]},
        baseline=np.array(-2.0), effects=ModelEffects(value=np.array(value)), token=[9], token_names=[" c"],
    )  # fmt: skip
    graph = attribution_graph(reply, "known")
    check(graph)
    named = {node["node_id"]: node["clerp"] for node in graph["nodes"]}
    links = {(named[link["source"]], named[link["target"]]): link["weight"] for link in graph["links"]}
    assert links == {
        ("Embeddings", "L1H0"): 1.0, ("L0H1", "L1H0"): -0.25, ("Embeddings", "L1H1"): 1.0, ("L0H1", "L1H1"): -0.25,
        ("Embeddings", 'Output " c" (p=0.000)'): 3.0, ("MLP 0", 'Output " c" (p=0.000)'): -1.0,
        ("L1H1", 'Output " c" (p=0.000)'): 4.0,
    }  # fmt: skip
    (queries,) = [node["qk_tracing_results"] for node in graph["nodes"] if "qk_tracing_results" in node]
    assert [(named[name], weight) for name, weight in queries["top_q_marginal_contributors"]] == [
        ("MLP 0", 2.0), ("Embeddings", -0.5)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """The graph that the command writes of the model that ships, and the reply that it is made of."""
    folder = tmp_path_factory.mktemp("graph")
    file, text = folder / "cat.json", "The cat sat on the"
    with live_server(folder) as url, Client(url, timeout=240) as client:
        result = invoke(["--url", url, "models", "graph", "tiny", text, "-o", str(file), "--smallest", "0"])
        assert result.exit_code == 0, result.output
        senders = {"parts": ["heads", "mlps", "embeddings"], "set": "mean"}
        parts = ["q", "k", "v", "mlps", "logits"]
        reply = client.models.effects("tiny", text, from_=senders, to={"parts": parts})
    return json.loads(file.read_text()), reply


def test_the_graph_of_a_model_has_every_path_with_its_sign_turned(graph):
    content, reply = graph
    check(content)
    assert content["metadata"]["scan"] == "tiny"
    assert "".join(content["metadata"]["prompt_tokens"]).endswith("on the")
    value = np.asarray(reply.effects.value).reshape(len(reply.swept["from"]), -1)
    position = len(content["metadata"]["prompt_tokens"]) - 1
    logits = [str(end) for end in reply.swept["to"]].index("logits")
    sent = {link["source"]: link["weight"] for link in content["links"] if link["target"].startswith("5_")}
    for at, end in enumerate(reply.swept["from"]):
        if end.part == "heads":
            assert sent[f"{end.layer}_{end.head}_{position}"] == pytest.approx(-value[at, logits], abs=1e-5)
    (top,) = [node for node in content["nodes"] if node["is_target_logit"]]
    assert top["token_prob"] == pytest.approx(float(np.exp(np.ravel(reply.baseline)[0])), abs=1e-5)
    assert max(node["influence"] for node in content["nodes"]) == pytest.approx(1)
    induction = next(node for node in content["nodes"] if node["clerp"] == "L1H0")
    assert induction["qk_tracing_results"]["top_k_marginal_contributors"]


def test_a_graph_needs_paths_and_one_stack(graph):
    _, reply = graph
    swept = reply.model_copy(update={"swept": {"layers": [0, 1]}})
    with pytest.raises(InvalidRequest, match="needs paths"):
        attribution_graph(swept, "a")
    with pytest.raises(InvalidRequest, match="predicted token"):
        attribution_graph(reply.model_copy(update={"token": None}), "a")
    ends = [end.model_copy(update={"layer": "decoder.0"}) for end in reply.swept["from"]]
    with pytest.raises(InvalidRequest, match="one stack"):
        attribution_graph(reply.model_copy(update={"swept": {**reply.swept, "from": ends}}), "a")
