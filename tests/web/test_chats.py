"""A text of several lines and a chat of turns: written under Text, and read by every view of a whole model."""

import json

import httpx
import pytest

from tests.conftest import live_server
from tests.web.conftest import PHONE

pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tests.client.tiny_models")
CHAT = [
    {"role": "user", "content": "Who sat on the mat?"},
    {"role": "assistant", "content": "The cat."},
    {"role": "user", "content": "Where did\nit sit?"},
]
ADDRESS = f"source=model:tiny&messages={json.dumps(CHAT)}"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The URL of a server with `tiny`, which reads chats, and a GPT-2 without a chat template."""
    from transformers import GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("models")
    GPT2LMHeadModel(tiny_models.CONFIGS["gpt2"]()).save_pretrained(folder / "plain")
    tiny_models.tokenizer().save_pretrained(folder / "plain")
    with live_server(folder) as url:
        httpx.post(f"{url}/v1/models", json={"checkpoint": "tiny"}, timeout=120).raise_for_status()
        yield url


def bodies_of(visit):
    """The bodies of what the page posts to the models, from now on."""
    found = []

    def keep(request):
        if request.method == "POST" and ("/v1/models/" in request.url or "/v1/completions" in request.url):
            found.append((request.url.rpartition("/")[2], json.loads(request.post_data)))

    visit.page.on("request", keep)
    return found


def tokens(page):
    return page.locator(".tokens span").all_inner_texts()


def test_enter_adds_a_line_to_a_text_and_control_enter_asks(visit):
    page = visit.open("#/text?source=model:tiny")
    box = page.get_by_label("Your text")
    box.fill("Kate met Tamiro.")
    box.press("Enter")
    box.type("Then Tam")
    assert page.url.partition("#/")[2].startswith("text")  # nothing was asked yet
    box.press("Control+Enter")
    page.wait_for_url("**#/overview?**")
    visit.drawn()
    assert "⏎" in "".join(tokens(page))
    box = page.get_by_label("Type a sentence")
    assert box.input_value() == "Kate met Tamiro.\nThen Tam"  # no line is lost where the text is shown
    box.press("Shift+Enter")
    assert box.input_value().count("\n") == 2
    box.press("Enter")
    page.wait_for_timeout(200)
    assert page.url.count("%0A") == 1  # what follows the text is cut
    assert visit.violations() == []


def test_turns_are_added_and_removed_and_sent_as_messages(visit):
    page = visit.open("#/text?source=model:tiny&text=Who+sat+on+the+mat%3F")
    page.get_by_role("combobox", name="Write").select_option("chat")
    assert page.get_by_role("textbox", name="Turn 1").input_value() == CHAT[0]["content"]
    assert page.get_by_role("combobox", name="Model").locator("option").all_inner_texts() == [
        "tiny"
    ]  # the other reads no chat
    for at, turn in enumerate([*CHAT[1:], {"role": "assistant", "content": "too much"}], start=2):
        page.get_by_role("button", name="Add a turn").click()
        assert page.get_by_label(f"Role {at}").input_value() == turn["role"]
        page.get_by_role("textbox", name=f"Turn {at}").fill(turn["content"])
    page.get_by_role("button", name="Remove turn 4").click()
    assert visit.violations() == []
    sent = bodies_of(visit)
    page.get_by_role("textbox", name="Turn 3").press("Control+Enter")
    page.wait_for_url("**#/overview?**")
    visit.drawn()
    assert {"weights"} <= {question for question, _ in sent}
    assert all(body["messages"] == CHAT and "text" not in body for _, body in sent)
    reply = visit.http.post("/v1/models/tiny/weights", json={"messages": CHAT}).json()
    assert len(tokens(page)) == len(reply["labels"]["tokens"])
    page.get_by_text("A chat of 3 turns").wait_for()
    page.get_by_role("button", name="Read a text instead").click()
    page.get_by_label("Type a sentence").wait_for()
    assert "messages" not in page.url


@pytest.mark.parametrize(
    ("view", "question"),
    [
        ("head", "weights"), ("query", "weights"), ("effects", "effects"), ("gradient", "gradients"), ("lens", "lens"),
        ("context", "context"), ("decode", "forward"),
    ],
)  # fmt: skip
def test_each_view_reads_the_chat(visit, view, question):
    page = visit.page
    sent = bodies_of(visit)
    visit.open(f"#/{view}?{ADDRESS}")
    page.get_by_text("A chat of 3 turns").wait_for()
    visit.until(lambda: any(asked == question for asked, _ in sent))
    assert all(body["messages"] == CHAT for asked, body in sent)
    visit.drawn()
    assert page.get_by_role("alert").count() == 0


def test_a_generation_answers_the_chat(visit):
    page = visit.open(f"#/decode?{ADDRESS}&length=3")
    sent = bodies_of(visit)
    page.get_by_role("button", name="Generate").click()
    page.wait_for_url("**came=3**")
    ids = visit.http.post("/v1/models/tiny/forward", json={"messages": CHAT, "top_k": 0}).json()["labels"]["ids"]
    assert [body["prompt"] for question, body in sent if question == "completions"] == [ids]
    assert page.locator(".generated button").count() == 3


def test_a_model_without_a_template_says_so(visit):
    page = visit.open(f"#/overview?source=model:plain&messages={json.dumps(CHAT)}")
    page.get_by_text("plain has no chat template").wait_for()
    page.get_by_role("button", name="Read a text instead").click()
    page.get_by_label("Type a sentence").wait_for()
    visit.drawn()
    page = visit.open("#/overview?source=model:tiny&messages=[1]")
    page.get_by_text("This is no chat").wait_for()


@PHONE
def test_a_chat_fits_a_phone(visit):
    page = visit.open(f"#/text?{ADDRESS}")
    page.get_by_role("textbox", name="Turn 3").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page = visit.open(f"#/overview?{ADDRESS}")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert visit.violations() == []
