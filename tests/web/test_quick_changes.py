"""What a view shows while the next answer is under way, and after one that never came."""

from contextlib import redirect_stdout
from io import StringIO

import pytest

CAT = "source=builtin:cat"


@pytest.fixture(scope="module")
def site(site_with_t5):
    return site_with_t5


class Held:
    """Requests that wait until they are let go."""

    def __init__(self, page, pattern: str) -> None:
        self.page, self.pattern, self.waiting = page, pattern, []
        page.route(pattern, lambda route: self.waiting.append(route))  # noqa: PLW0108 - Playwright marks the function

    def release(self) -> None:
        for each in reversed(self.waiting):  # the answer to the first question comes last
            each.continue_()
        self.page.unroute(self.pattern)


def choose(page, label: str, value: str) -> None:
    page.locator(".subject label", has=page.locator("span", has_text=label)).locator("select").select_option(value)


@pytest.mark.parametrize("view", ["edit", "effects", "query", "learn", "gradient"])
def test_numbers_keep_their_own_names_until_the_next_are_there(visit, view):
    page = visit.open(f"#/{view}?{CAT}&layer=1&head=2")
    section = page.locator("[aria-busy=false]").first
    section.wait_for()
    before = section.inner_text()
    held = Held(page, "**/v1/attention/*")
    choose(page, "Layer", "3")
    page.wait_for_url("**layer=3**")
    page.locator("[aria-busy=true]").first.wait_for()
    visit.until(lambda: held.waiting)
    assert page.locator("[aria-busy=true]").first.inner_text().startswith(before)
    held.release()
    page.locator("[aria-busy=true]").first.wait_for(state="detached")
    assert page.locator("[aria-busy=false]").first.inner_text() != before


def test_gradients_of_stacks_of_unlike_lengths_follow_quick_changes_of_the_layer(visit):
    page = visit.open("#/gradient?source=model:t5&text=the cat sat on the mat&target=a dog&layer=0&head=1")
    caption = page.locator("figcaption", has_text="∂L/∂weights of")
    caption.wait_for()
    assert "encoder.0" in caption.inner_text()
    held = Held(page, "**/v1/models/t5/gradients")
    names = page.locator(".subject label", has_text="Layer").locator("option").all_inner_texts()
    for name in ("decoder.0", "cross.0", "decoder.1"):
        choose(page, "Layer", str(names.index(name)))
        page.wait_for_timeout(50)
    assert "encoder.0" in caption.inner_text()
    held.release()
    page.locator("figcaption", has_text="∂L/∂weights of decoder.1").wait_for()


def test_a_refusal_is_not_shown_beside_the_next_sentence(visit):
    page = visit.open("#/overview?source=model:tiny")
    sentence = page.get_by_label("Type a sentence")
    sentence.fill("the cat " * 700)
    sentence.press("Enter")
    page.get_by_role("alert").wait_for()
    visit.refused(1)
    held = Held(page, "**/v1/models/tiny/weights")
    sentence.fill("the cat")
    sentence.press("Enter")
    page.get_by_text("Opening…").wait_for()
    assert page.get_by_role("alert").count() == 0
    visit.until(lambda: held.waiting)
    held.release()
    page.locator(".multiples li").first.wait_for()


def test_statistics_that_did_not_come_are_requested_again(visit):
    page = visit.page
    lost = []

    def lose_the_first(route) -> None:
        if not lost and "statistic_options" in (route.request.post_data or ""):
            lost.append(route.request.url)
            route.abort()
        else:
            route.continue_()

    page.route("**/v1/models/tiny/weights", lose_the_first)
    page.goto(f"{visit.url}/#/overview?source=model:tiny&text={'the cat sat on the mat. ' * 73}")
    page.locator(".multiples li").first.wait_for(timeout=30_000)
    assert len(lost) == 1
    assert page.get_by_role("alert").count() == 0
    assert len(visit.faults) == 1  # the browser's line about the lost request
    visit.faults.clear()


def test_the_text_of_the_decoder_follows_a_step_back(visit):
    page = visit.open("#/overview?source=model:t5&text=the cat")
    target = page.get_by_label("The decoder's text")
    target.fill("a dog")
    page.get_by_role("button", name="Look").click()
    page.wait_for_url("**target=a+dog**")
    page.go_back()
    page.wait_for_function("!location.hash.includes('target')")
    visit.until(lambda: target.input_value() == "")


def test_a_text_that_is_written_during_a_generation_is_not_continued_by_itself(visit):
    page = visit.open("#/decode?source=model:tiny&length=200")
    requests = []
    page.on(
        "request", lambda each: each.url.endswith("/completions") and requests.append(each.post_data_json["prompt"])
    )
    page.get_by_role("button", name="Generate").click()
    page.locator(".generated button").first.wait_for()
    text = page.get_by_role("textbox", name="Text")
    text.fill("A dog")
    text.press("Tab")
    page.wait_for_url("**text=A+dog**")
    page.get_by_role("button", name="Generate").wait_for()
    page.wait_for_timeout(500)
    assert len(requests) == 1
    assert "came=" not in page.url


def test_copied_python_of_a_generation_runs_whatever_the_text_holds(visit):
    page = visit.open("""#/decode?source=model:tiny&length=2&text=it%27%27%27s %22\\%22 true""")
    page.get_by_role("button", name="Generate").click()
    page.get_by_role("group", name="Save").wait_for()
    command = page.locator(".command details", has_text="completions")
    command.locator("summary").click()
    with redirect_stdout(StringIO()) as printed:
        exec(command.locator("pre").nth(1).text_content(), {})  # noqa: S102 - the test is whether it runs
    shown = [each.replace("·", " ", 1) for each in page.locator(".generated button").all_inner_texts()]
    assert repr("".join(shown)) in printed.getvalue()
