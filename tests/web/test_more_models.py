"""One click fetches a model from a hub, with its progress, and then its attention is there."""

import pytest

from tests.api.hub import hub, hub_of_this_process
from tests.conftest import eventually, live_server

tiny_models = pytest.importorskip("tests.client.tiny_models")
pytest.importorskip("huggingface_hub")
GPT2 = "openai-community/gpt2"


@pytest.fixture(scope="module")
def mirror(tmp_path_factory):
    """The folder of a hub whose GPT-2 has random parameters, 4 MB of them."""
    from transformers import GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("hub")
    config = tiny_models.CONFIGS["gpt2"]()
    config.n_positions = 2**20 // config.n_embd
    GPT2LMHeadModel(config).save_pretrained(folder / GPT2)
    tiny_models.tokenizer().save_pretrained(folder / GPT2)
    return folder


@pytest.fixture(scope="module")
def served(mirror):
    with hub(mirror) as served, hub_of_this_process(served.address):
        yield served


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def site(served, store):
    with live_server(store, hub=True) as url:
        yield url


def test_what_cannot_be_fetched_is_reported_in_the_menu(visit):
    page = visit.open("#/model")
    page.get_by_text("More models").click()
    page.get_by_label("From the Hugging Face hub").select_option("")
    page.get_by_role("textbox", name="Repository").fill("org/none")
    page.get_by_role("button", name="Fetch and load").click()
    page.get_by_role("alert").filter(has_text="no repository 'org/none'").wait_for()
    visit.refused(1)
    assert visit.violations() == []


def test_one_click_fetches_and_loads_a_model(visit, served, store):
    served.go_on.clear()
    page = visit.open("#/overview?source=model:tiny&text=the+cat+sat")
    page.locator(".multiples li").first.wait_for(timeout=120_000)
    page.get_by_text("More models").click()
    page.get_by_label("From the Hugging Face hub").select_option(GPT2)
    assert "523 MiB · MIT" in page.get_by_label("From the Hugging Face hub").inner_text()
    page.get_by_role("button", name="Fetch and load").click()
    page.get_by_text("MiB of 4").wait_for()
    assert 0 < page.get_by_label(f"Fetching {GPT2}").evaluate("bar => bar.value") < 1
    assert visit.violations() == []
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Fetch and load").wait_for()
    served.go_on.set()
    eventually(lambda: list(store.iterdir()) == [])
    served.go_on.clear()
    page.get_by_role("button", name="Fetch and load").click()
    page.get_by_text("MiB of").wait_for()
    page.reload()  # the server goes on, and the page shows it again
    page.get_by_text("More models").click()
    page.get_by_text("MiB of").wait_for()
    served.go_on.set()
    page.wait_for_url("**source=model%3Aopenai-community--gpt2**")
    page.locator("option:checked", has_text="openai-community--gpt2 · whole model").wait_for(state="attached")
    page.locator(".linked svg > text", has_text="sat").first.wait_for(timeout=120_000)
    assert "text=the+cat+sat" in page.url
    assert served.taken.count("model.safetensors") == 2
    assert visit.violations() == []
