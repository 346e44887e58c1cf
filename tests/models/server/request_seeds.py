"""Requests to small models of every kind of input that are answered as they stand, with as many fields as go together.

``bad_requests`` makes wrong ones of them. An operation of models without a seed fails its test.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from tests.client.tiny_models import tokenizer
from tests.client.transformers.families import tiny
from tests.models.answers.small_classifiers import sharp, words
from tests.models.inputs.images import small_encoders
from tests.models.inputs.sounds import small_sounds
from tools.models_walk.model_types import built

TEXT = "Kate met Tom in the park. Then"
WORDS = "the cat sat on the mat"
WIDE = [0.1] * 64
"""Numbers for each dimension of the states of ``tiny``."""


class Seed(NamedTuple):
    """A request to one model."""

    model: str
    operation: str
    body: dict[str, Any]


def write_models(root: Path) -> None:
    """Write the checkpoints, beside that of ``tiny``, which ships with the server."""
    for name, model, read in (
        ("masked", sharp("bert", "ForMaskedLM"), words()),
        ("ranks", sharp("bert", "ForSequenceClassification", num_labels=1, id2label=None, label2id=None), words()),
        ("pair", tiny("t5"), tokenizer()),
        ("experts", built("mixtral"), tokenizer()),
        ("states", built("mamba2"), tokenizer()),
        ("sees", small_encoders.eager("vit"), small_encoders.processor("vit")),
    ):
        model.save_pretrained(root / name)
        read.save_pretrained(root / name)
    small_sounds.written("whisper", root / "whisper")


def seeds(http: httpx.Client) -> Iterator[Seed]:
    """Yield every seed. Those that name a vector or a probe name one that is stored now."""
    vector = made(http, "/v1/models/tiny/vectors", directions={"1": WIDE, "2": WIDE})
    probe = made(http, "/v1/models/tiny/probes", of={"point": "hidden", "layer": 1}, weights=WIDE)
    edits = {
        "0": [{"tap": "context", "heads": [0, 1], "queries": [0], "set": 0}],
        "1": [
            {"tap": "hidden", "add": {"vector": vector, "scale": 2.0}},
            {"tap": "weights", "keys": [0], "scale": 0.5, "renormalize": True},
        ],
        "2": [{"tap": "output", "value": [0.5] * 64}],
    }
    edit = {"1": edits["1"]}
    draws = {
        "max_tokens": 3, "temperature": 1.0, "top_p": 0.5, "seed": 1, "stop": ["x"], "stop_token_ids": [3],
        "logit_bias": {"7": 1}, "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.5, "presence_penalty": 0.1,
        "frequency_penalty": 0.1, "min_tokens": 1,
    }  # fmt: skip
    looks = {
        "layers": [0], "heads": [0], "statistics": ["entropy", "classes"], "top_k": 2, "weights": True, "edits": edits,
        "statistic_options": {"spans": [{"name": "s", "tokens": [0, 1]}], "token_classes": {"a": [5]}},
        "steer": [{"vector": vector, "scale": 2.0, "layers": [1]}], "from": "answer",
        "watch": [{"probe": probe, "prompt": True, "stop": {"above": 1e4}}],
    }  # fmt: skip
    sides = {"positive": ["Kate met", "Leo"], "negative": ["Tom met", "Amy"]}
    samples = {"texts": ["Kate", "Tom", "Kate met", "Tom met"], "folds": 2}
    answered = [{"text": "Kate", "answer": " met"}]
    prompt = {"text": "Kate met Tom. Leo met Amy."}
    talk = [{"role": "user", "content": "Kate met"}]
    yield from (Seed("tiny", *asked) for asked in (
        ("model_forward", {
            "text": [TEXT, "Tom met"], "answer": [" he", "she"], "layers": [0, 1], "edits": edits,
            "return": ["weights", "q"], "select": {"heads": [0], "queries": [1]}, "positions": [[0], [1]], "top_k": 2,
            "compare": "unedited", "watch": [{"probe": probe}],
        }),
        ("model_forward", {"tokens": [[1, 2, 3], [4, 5, 6]]}),
        ("model_forward", {"messages": talk, "return": ["hidden"], "layers": [3]}),
        ("model_weights", {
            "text": TEXT, "layers": [0], "edits": edit, "top_k": 2, "select": {"heads": [0], "queries": [1]},
            "pool": 2, "statistics": ["entropy", "pairs", "classes", "locality"], "compare": "unedited",
            "statistic_options": {
                "window": 2, "sinks": 1, "token_classes": {"a": [5]}, "passages": {"p": "Kate"},
                "spans": [{"name": "s", "characters": [0, 4]}, {"name": "t", "tokens": [0, 2]}],
                "pairs": [[1, 0], [2, 1]], "candidates": [0, 1],
            },
        }),
        ("model_weights", {"text": TEXT, "normalize": "apc", "statistics": ["max_weight", "received"]}),
        ("model_weights", {
            "text": TEXT, "answer": " Tom", "statistics": ["retrieval"], "statistic_options": {"needle": "Tom"},
        }),
        ("model_gradients", {
            "text": TEXT, "layers": [0, 1], "edits": edit, "of": {"position": -1, "token": 5, "against": 6},
            "wrt": ["weights", "tokens"], "integrated": {"steps": 2, "rule": "midpoint", "baseline": "mean"},
        }),
        ("model_gradients", {"text": TEXT, "answer": " Kate", "of": {"answer": "mean"}}),
        ("model_effects", {
            "text": TEXT, "layers": [0, 1], "edits": edit, "of": {"token": 5},
            "sweep": {"tap": "context", "over": ["layers", "heads"], "heads": [0, 1], "set": 0},
        }),
        ("model_effects", {"text": TEXT, "sweep": {
            "tap": "hidden", "over": ["layers", "scales", "queries"], "query_groups": [[0, 1], [2]],
            "scales": [0.5, 1.0], "add": [0.5] * 64,
        }}),
        ("model_effects", {
            "text": "Kate met", "from": {"parts": ["heads", "mlps"], "layer": [0, 1], "text": "Tom met"},
            "to": {"parts": ["q", "logits"], "layer": [2]},
        }),
        ("model_complexity", {
            "length": 16, "batch": 2, "new_tokens": 4, "weights": True, "lens": ["hidden"], "fit": True,
            "vector": {"layers": [0], "method": "pca"}, "probe": {"of": {"point": "hidden", "layer": 1}, "samples": 2},
            "sweep": {"tap": "context", "set": 0},
        }),
        ("model_complexity", {"length": 16, "from": {"parts": ["heads"]}, "to": {"parts": ["q"]}}),
        ("model_context", prompt | {
            "sources": [{"text": "Kate met Tom."}, {"span": [14, 26]}], "answer": "Leo met.", "heads": 2,
            "return": ["removed", "attention", "gradient"],
        }),
        ("model_context", prompt | {"split": "sentences"} | draws),
        ("model_similarity", {"pairs": [["Kate", "Tom"]], "pooling": "mean"}),
        ("model_lens", {
            "text": TEXT, "of": ["hidden", "heads"], "layers": [0, 1], "positions": [0, -1], "top_k": 2,
            "targets": [5, 6], "edits": edit,
        }),
        ("fit_lens", {"texts": ["Kate met Tom"], "skip_first": 1, "max_tokens": 4}),
        ("fit_probe", samples | {
            "of": {"point": "hidden", "layer": 1}, "labels": [0, 1, 0, 1], "positions": [0, 0, 1, -1],
            "method": "ridge", "regularization": 1.0, "false_positive_rate": 0.1,
        }),
        ("fit_probe", samples | {
            "of": {"statistics": ["entropy"], "heads": [0]}, "labels": [[0], [1]] * 2, "positions": [[0]] * 4,
        }),
        ("fit_probe", {"of": {"vector": vector, "layer": 1}, "weights": [1.0], "bias": 0.5, "scale": [2.0]}),
        ("fit_vector", sides | {"method": "pca", "layers": [0, 1], "position": "mean"}),
        ("fit_vector", {"positive": answered, "negative": [{"text": "Tom", "answer": " met"}], "position": "answer"}),
        ("fit_vector", {"directions": {"0": WIDE, "1": WIDE}}),
        ("create_completion", {"prompt": "Kate met", "logprobs": 2, "logprob_tokens": [5, 6], "attention": looks}
            | draws),
        ("create_completion", {"prompt": ["Kate", "Tom"], "n": 2, "echo": True, "logprobs": 1, "max_tokens": 2}),
        ("create_chat_completion", {
            "messages": talk, "max_tokens": 3, "logprobs": True, "top_logprobs": 2, "logprob_token_ids": [5],
            "attention": {"layers": [0], "steer": [{"id": vector, "layer": 1}]},
        }),
        ("create_response", {"input": talk, "max_output_tokens": 3, "top_logprobs": 2, "attention": {"layers": [0]}}),
        ("tokenize", {"prompt": "Kate met"}),
        ("tokenize", {"messages": talk}),
        ("create_embedding", {"input": ["Kate met", "Tom"], "dimensions": 8, "encoding_format": "float"}),
    ))  # fmt: skip
    yield Seed("masked", "model_forward", {"text": WORDS, "likelihood": "masked"})
    yield Seed("masked", "model_forward", {"tokens": [3, 5, 7], "token_type_ids": [0, 0, 1]})
    yield Seed("ranks", "model_forward", {"text": WORDS, "text_pair": "the dog"})
    yield Seed("ranks", "rerank", {"query": "the cat", "documents": ["the dog", "the mat"], "top_n": 1})
    yield Seed("ranks", "score", {"text_1": "the cat", "text_2": ["the dog", "the mat"]})
    yield Seed("pair", "model_forward", {"text": WORDS, "target": "the dog", "return": ["hidden"]})
    yield Seed("pair", "create_completion", {"prompt": WORDS, "max_tokens": 2})
    yield Seed("experts", "model_forward", {
        "text": WORDS, "return": ["router"], "edits": {"0": [{"tap": "router", "experts": [1], "scale": 0.5}]},
    })  # fmt: skip
    yield Seed("states", "model_weights", {"text": WORDS, "layers": [0], "normalize": "absolute"})
    image = small_encoders.sent(small_encoders.noise(16, 16))
    yield Seed("sees", "model_weights", {"images": [image], "layers": [0], "statistics": ["entropy"]})
    sound = small_sounds.sent(small_sounds.speech(0.5))
    yield Seed("whisper", "model_forward", {"audio": [sound], "return": ["weights"], "layers": ["encoder.0"]})
    yield Seed("whisper", "create_transcription", {
        "file": sound, "language": "en", "response_format": "verbose_json", "temperature": 0, "include": ["logprobs"],
        "timestamp_granularities": ["word", "segment"], "alignment_heads": [[0, 1]],
        "attention": {"layers": ["cross.0"], "top_k": 1},
    })  # fmt: skip
    yield Seed("whisper", "create_transcription", {"file": sound, "growing": {"accepted": [], "frames": 4}})


def made(http: httpx.Client, path: str, **body: Any) -> str:
    """The id of what a request stores."""
    return str(http.post(path, json=body).raise_for_status().json()["id"])
