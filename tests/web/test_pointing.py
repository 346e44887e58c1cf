"""What is pointed at in one drawing is marked in all others of the view; lines of several heads have colours."""

import re
from pathlib import Path

import numpy as np
import pytest

import attention_service

RECORDING = Path(attention_service.__file__).parent / "web/recordings/cat.safetensors"
MARK = """e => {
  const style = getComputedStyle(e, '::after');
  return [style.left, style.top, style.width, style.height].map(parseFloat);
}"""
"""Where the mark of a small map lies: left, top, width and height in pixels."""


def orange(canvas) -> np.ndarray:
    """True at the pixels of a map that have the colour of its mark: ``[height, width]`` in CSS pixels."""
    pixels = canvas.evaluate(
        "c => { const {data, width, height} = c.getContext('2d').getImageData(0, 0, c.width, c.height);"
        " return [Array.from(data), width, height] }"
    )
    image = np.array(pixels[0]).reshape(pixels[2], pixels[1], 4)[..., :3]
    return (abs(image - [168, 74, 22]) < 30).all(-1)


def test_a_cell_of_a_small_map_is_marked_everywhere_and_read_out(visit, recorded):
    page = visit.open("#/overview?layer=1&head=3")
    small = page.get_by_role("link", name="Open L2H5", exact=True).first.locator(".map")
    box = small.bounding_box()
    query, key = 8, 2
    page.mouse.move(box["x"] + (key + 0.5) * box["width"] / 13, box["y"] + (query + 0.5) * box["height"] / 13)
    page.get_by_role("heading", name="L2H5").wait_for()  # beside the small ones
    weight = recorded.weights(2)[5, query, key]
    page.locator(".linked > .readout", has_text=f"it looks at cat: {weight:.3g}").wait_for()
    assert page.locator(".linked .heatmap .readout").inner_text().split()[:3] == ["it", "→", "cat"]
    for at in (0, 29, 71):
        left, top, wide, high = page.locator(".multiples .map").nth(at).evaluate(MARK)
        assert [left, top] == pytest.approx([key * box["width"] / 13, query * box["height"] / 13], abs=0.6), at
        assert min(wide, high) >= 5
    assert page.locator(".tokens .query").all_inner_texts() == ["it"]
    assert page.locator(".tokens .key").all_inner_texts() == ["cat"]
    marked = orange(page.locator(".linked canvas"))
    assert marked.any()
    lines = page.locator(".linked svg path")
    strong = lines.evaluate_all(
        "(all) => all.map((e) => [e.querySelector('title').textContent, Number(e.getAttribute('opacity'))])"
    )
    assert {title.split(" → ")[0] for title, _ in strong} == {"it"}
    assert strong[[title.startswith("it → cat:") for title, _ in strong].index(True)][1] >= min(1, 0.08 + weight) - 2e-3
    page.get_by_role("heading", name="Overview").hover()
    page.locator(".linked > .readout", has_text="Point at").wait_for()
    assert page.locator(".multiples").get_attribute("data-pointed") == ""
    assert page.locator(".tokens .query").count() == 0


def test_a_token_of_the_text_points_in_lines_maps_and_the_grid(visit, recorded):
    page = visit.open("#/overview?layer=1&head=3")
    page.locator(".tokens span", has_text="because").hover()
    weights = recorded.weights(1)[3, 7].astype(float)
    best = int(weights.argmax())
    tokens = recorded.facts.tokens["layers"]
    page.locator(".linked > .readout", has_text=f"because looks at {tokens[best]} {weights[best]:.2f}").wait_for()
    assert page.locator(".linked svg path").count() == (weights >= 0.01).sum()
    left, top, wide, _ = page.locator(".multiples .map").nth(40).evaluate(MARK)
    box = page.locator(".multiples .map").nth(40).bounding_box()
    assert (left, top) == (0, pytest.approx(7 * box["height"] / 13, abs=0.6))
    assert wide > box["width"] - 4
    shades = page.locator(".tokens span").evaluate_all(
        "(all) => all.map((e) => parseInt(getComputedStyle(e).backgroundColor.slice(4)))"
    )
    assert int(np.argmin(shades)) == best  # the darkest
    assert visit.violations() == []


def test_maps_beside_each_other_mark_the_same_cell(visit, recorded):
    page = visit.open("#/compare?layer=1&head=3&b_head=5")
    maps = page.locator(".side .heatmap")
    maps.nth(2).locator("canvas").wait_for()
    maps.first.locator("canvas").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    readout = [maps.nth(at).locator(".readout b") for at in range(3)]
    readout[2].filter(has_text=re.compile(r"\d")).wait_for()
    one, other = (float(recorded.weights(1)[head, 2, 1]) for head in (3, 5))
    shown = [float(each.inner_text().replace("−", "-")) for each in readout]
    assert shown == pytest.approx([one, other, one - other], rel=1e-4)
    marks = [orange(maps.nth(at).locator("canvas")) for at in range(2)]
    assert all(each.any() for each in marks)
    assert np.array_equal(*(np.argwhere(each).min(0) for each in marks))


def test_a_query_s_bars_are_pointed_at_with_its_tokens(visit):
    page = visit.open("#/query?layer=1&head=3&query=8")
    bars = page.locator(".side svg.drawing")
    bars.locator("text", has_text="tired").hover()
    page.locator(".tokens .key", has_text="tired").wait_for()
    assert bars.locator("rect[stroke]").count() == 1
    page.locator(".tokens span", has_text="mat").click()
    page.wait_for_url("**query=6**")


def test_heads_of_a_layer_have_lines_of_their_colours(visit, recorded):
    page = visit.open("#/head?layer=1&head=3&show=lines&least=0.2")
    legend = page.get_by_role("list", name="Heads whose lines are drawn")
    assert legend.get_by_role("button", name=re.compile("^Lines of")).count() == 12
    for head in (5, 9):
        legend.get_by_role("button", name=f"Lines of L1H{head}", exact=True).click()
    page.wait_for_url("**lines=3%2C5%2C9**")
    page.locator(".drawing .pick").nth(20).wait_for(state="attached")
    drawn = page.locator(".drawing .pick > :first-child").evaluate_all(
        "(all) => all.map((e) => [e.getAttribute('stroke'), e.getAttribute('stroke-dasharray'), e.textContent])"
    )
    weights = recorded.weights(1).astype(float)
    for head in (3, 5, 9):
        stroke = legend.locator("li").nth(head).locator("path")
        style = [stroke.get_attribute("stroke"), stroke.get_attribute("stroke-dasharray")]
        own = [title for *found, title in drawn if found == style]
        assert len(own) == (weights[head] >= 0.2).sum()
        assert all(title.startswith(f"L1H{head}: ") for title in own)
    assert len({(ink, dash) for ink, dash, _ in drawn}) == 3
    visit.picture("lines-heads")
    page.locator(".drawing text", has_text="cat").first.hover()
    readout = page.locator(".caption", has_text="cat looks most at L1H3")
    readout.wait_for()
    tokens = recorded.facts.tokens["layers"]
    for head in (3, 5, 9):
        assert f"L1H{head} {tokens[weights[head, 2].argmax()]} {weights[head, 2].max():.2f}" in readout.inner_text()
    legend.get_by_role("button", name="Lines of L1H5", exact=True).click()
    page.wait_for_url("**lines=3%2C9**")
    assert visit.violations() == []


def test_a_line_opens_its_head(visit):
    page = visit.open("#/head?layer=1&head=3&show=lines&least=0.5&lines=3,8")
    line = page.locator(".drawing .pick", has_text="L1H8: ").first
    pair = re.fullmatch(r"L1H8: (\S+) → (\S+): .*", line.locator("title").first.text_content())
    line.locator("path").last.dispatch_event("click")
    page.wait_for_url(lambda url: "head=8" in url and "lines" not in url)
    readout = page.locator(".heatmap .readout")
    readout.filter(has_text=f"{pair[1]} → {pair[2]}").wait_for()
    page.get_by_role("button", name="Undo").click()
    page.locator(".colours").get_by_role("link", name="L1H3", exact=True).click()
    page.wait_for_url(lambda url: "head=3" in url and "lines" not in url)


@pytest.mark.parametrize("visit", [{"viewport": {"width": 390, "height": 844}, "has_touch": True}], indirect=True)
def test_lines_of_all_heads_fit_on_a_phone(visit):
    page = visit.open("#/head?layer=1&head=3&show=lines")
    page.get_by_role("button", name="All heads").click()
    page.locator(".drawing .pick").nth(200).wait_for(state="attached")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.get_by_role("button", name="All heads").is_disabled()
    page.get_by_role("button", name="One head").click()
    page.wait_for_url(lambda url: "lines=" not in url)
