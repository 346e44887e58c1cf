"""``attention context`` highlights the parts of a prompt that made an answer, and writes them as files."""

import xml.etree.ElementTree as ET

import numpy as np
import pytest

from attention_client.cli.commands import context_commands
from attention_contract.schemas.analyses.context import (
    Ablation,
    AnswerSentence,
    ContextReply,
    HeadSources,
    LayerLookback,
    SourcePlace,
)
from attention_contract.schemas.prompts import ModelRan
from attention_pictures.context.context_files import context_html, context_svg
from attention_pictures.context.highlights import chosen_measure, views
from tests.client.cli.command_line import invoke

PROMPT = "The cat sat. <b>A dog & a fox ran.</b> So it was."
RAN = ModelRan(
    model="net", architecture="GPT2LMHeadModel", device="cpu", dtype="float32", kernels=[], compute_ms=1, queue_ms=1,
    peak_bytes=1,
)  # fmt: skip


def reply(**changed):
    two = np.array([[0.5, 0.1], [0.2, 0.3]], np.float32)
    fields = {
        "labels": [], "ran": RAN, "prompt": PROMPT, "answer_text": " A cat. A dog.", "generated": False,
        "sources": [
            SourcePlace(name="first", text=PROMPT[:12], span=(0, 12), tokens=(0, 4)),
            SourcePlace(name="<second>", text=PROMPT[13:38], span=(13, 38), tokens=(4, 9)),
        ],
        "answer": [
            AnswerSentence(text="A cat.", span=(1, 7), tokens=(12, 14), logprob=-1.0),
            AnswerSentence(text="A dog.", span=(8, 14), tokens=(14, 16), logprob=-2.0),
        ],
        "attention": two, "gradient": -two,
        "ablation": Ablation(hidden=np.array([[-4.0, 1.0], [0.5, -3.0]], np.float32)),
        "heads": [HeadSources(layer=1, head=2, effect=0.5, attention=two)],
        "lookback": [LayerLookback(layer=0, heads=two)],
    }  # fmt: skip
    return ContextReply(**fields | changed)


class Played:
    """A client whose model has read the prompt."""

    def __init__(self):
        self.models, self.replies = self, reply()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def context(self, model, text, **fields):
        self.call = (model, text, fields)
        return self.replies


@pytest.fixture
def played(monkeypatch):
    client = Played()
    monkeypatch.setattr(context_commands, "client_of", lambda _: client)
    monkeypatch.setattr(context_commands, "loading_shown", lambda *_: client)
    return client


def test_the_prompt_is_shown_for_the_answer_and_for_each_sentence_with_its_strongest_sources(played):
    lines = invoke(["context", "net", PROMPT, "--answer", " A cat. A dog."]).output.splitlines()
    assert lines[:8] == [
        "A cat. A dog.", "[[The cat sat.]] [[<b>A dog & a fox ran.</b>]] So it was.", "",
        "A cat.", "[[The cat sat.]] <b>A dog & a fox ran.</b> So it was.", "",
        "A dog.", "The cat sat. [[<b>A dog & a fox ran.</b>]] So it was.",
    ]  # fmt: skip
    assert [line.split()[:4] for line in lines[9:12]] == [
        ["source", "hidden", "attention", "gradient"], ["first", "+3", "+0.3", "-0.6"],
        ["<second>", "+2.5", "+0.25", "-0.5"],
    ]  # fmt: skip
    assert lines[12:] == ["heads that matter most: L1H2 +0.5", "lookback ratio: 0.275 on average over 2 heads"]
    assert played.call == ("net", PROMPT, {"answer": " A cat. A dog."})


def test_options_are_the_fields_of_the_request(played):
    invoke([
        "context", "net", "a b", "--source", "a", "--source", '{"name": "last", "text": "b"}', "--max-tokens", "5",
        "--show", "gradient", "--return", "attention", "--return", "gradient",
    ])  # fmt: skip
    fields = {
        "sources": [{"text": "a"}, {"name": "last", "text": "b"}], "max_tokens": 5,
        "return_": ["attention", "gradient"],
    }  # fmt: skip
    assert played.call == ("net", "a b", fields)
    played.replies = reply(ablation=Ablation(removed=np.ones((2, 2), np.float32)))
    invoke(["context", "net", "hello", "--chat", "--show", "removed"])
    returned = ["attention", "gradient", "hidden", "lookback", "removed"]
    assert played.call == ("net", None, {"messages": [{"role": "user", "content": "hello"}], "return_": returned})
    assert '"answer_text":" A cat. A dog."' in invoke(["context", "net", "a", "--json"]).output


def test_files_hold_the_highlighted_prompt(played, tmp_path):
    html, svg = tmp_path / "a.html", tmp_path / "a.svg"
    assert invoke(["context", "net", PROMPT, "--html", str(html), "--svg", str(svg)]).exit_code == 0
    page = html.read_text("utf-8")
    assert page.count("<mark") == 2 * 3
    assert "&lt;b&gt;A dog &amp; a fox ran.&lt;/b&gt;" in page
    assert "<b>" not in page
    assert "title='first: hidden +4, attention +0.5, gradient -0.5'" in page
    picture = ET.fromstring(svg.read_text("utf-8"))  # noqa: S314 - it was written here
    rectangles = [each for each in picture.iter("{http://www.w3.org/2000/svg}rect") if each.get("fill-opacity")]
    assert [float(each.get("fill-opacity")) for each in rectangles][:2] == [
        0.55,
        pytest.approx(0.55 * 2.5 / 3, abs=1e-3),
    ]
    assert {each.get("fill") for each in rectangles} == {"rgb(30, 110, 240)", "rgb(225, 95, 0)"}
    refused = invoke(["context", "net", PROMPT, "--html", str(tmp_path / "a.svg")])
    assert refused.exit_code == 2


def test_a_picture_breaks_long_lines_and_keeps_every_word():
    prompt = "word " * 60 + "\n" + "x" * 200
    whole = reply(
        prompt=prompt,
        sources=[SourcePlace(name="all", text=prompt, span=(0, len(prompt)), tokens=(0, 60))],
        ablation=None,
        attention=np.ones((1, 2)),
        gradient=None,
    )
    picture = ET.fromstring(context_svg(whole, "attention"))  # noqa: S314
    lines = [each.text for each in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert max(map(len, lines)) <= 96
    assert sum(line.split().count("word") for line in lines) == 3 * 60
    assert "".join(lines).count("x") == 3 * 200
    assert "background" in context_html(whole, "attention")


def test_a_measure_that_the_reply_has_not_is_named():
    with pytest.raises(
        ValueError, match="expected one of the reply's measures, hidden, attention, gradient; got removed"
    ):
        chosen_measure(reply(), "removed")
    assert [view.heading for view in views(reply(answer=reply().answer[:1]), "hidden")] == ["A cat. A dog."]
