"""Labels of alternatives: in words, each another."""

from attention_contract.schemas.costs.complexity import Alternative
from attention_service.runtime.operations.complexity.alternatives import labels

DIFFERENT = [
    {"spec": {"softcap": 30}},
    {"spec": {"softcap": 50}},
    {"spec": {"normalizer": {"name": "softmax", "temperature": 2, "sinks": True}}},
    {"spec": {"masks": [{"name": "any", "of": [{"name": "causal"}, {"name": "block", "size": 4}]}]}},
    {"spec": {"add_zero_attn": True}},
    {"spec": {}},
    {"return": ["output", "weights"]},
]


def test_labels_tell_apart_whatever_differs():
    found = labels([Alternative.model_validate(each) for each in DIFFERENT])
    assert len({"request", *found}) == 1 + len(DIFFERENT)
    assert max(map(len, found)) < 100
    assert {"softcap 30", "softcap 50", "softmax (temperature 2, sinks)", "plain spec", "add_zero_attn"} <= set(found)
    assert "any (of causal or block (size 4))" in found
    assert "returning output, weights" in found
