"""Maps of a notebook in a browser: several in one page, without a server."""

import numpy as np

from attention_pictures.notebook.notebook_maps import Maps


def test_maps_draw_and_tell_what_is_below_the_pointer(browser, tmp_path):
    first = Maps(np.array([np.eye(2), [[0.25, 0.1234567], [1, 0]]]), ["H0", "H1"], ["the", "cat"], ["a", "<b>"], "One")
    second = Maps(np.ones((1, 3, 3)), ["H0"], list("xyz"), list("xyz"), "Two")
    third = Maps(np.array([[[-1, 0, 0.5]]]), ["H0"], ["x"], list("xyz"), "Three", signed=True)
    file = tmp_path / "notebook.html"
    file.write_text(f"<meta charset=utf-8>{first.html()}{second.html()}{third.html()}", "utf-8")
    page, faults = browser.new_page(), []
    page.on("console", lambda line: faults.append(line.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: request.url.startswith("file:") or faults.append(request.url))
    page.goto(f"file://{file}")
    one, two, three = (page.locator(".attention-maps").nth(at) for at in range(3))
    one.get_by_label("Head", exact=True).select_option("1")
    assert one.locator(".tops div").all_inner_texts() == ["a", "<b>"]
    assert one.locator(".rows div").all_inner_texts() == ["the", "cat"]
    assert one.locator(".bar span").all_inner_texts() == ["1", "0"]
    heads = one.get_by_role("group", name="All: head").get_by_role("button")
    assert [each.get_attribute("aria-pressed") for each in heads.all()] == ["false", "true"]
    heads.nth(0).click()
    assert one.locator("canvas").get_attribute("aria-label").startswith("H0")
    assert one.get_by_label("Head", exact=True).input_value() == "0"
    heads.nth(1).click()
    assert two.get_by_role("button").count() == 0, "one head needs no choice"
    one.locator("canvas").hover(position={"x": 30, "y": 5})
    assert one.get_by_role("status").inner_text() == "the → <b>: 0.1234567"
    one.locator("canvas").focus()
    page.keyboard.press("ArrowDown")
    assert one.get_by_role("status").inner_text() == "cat → <b>: 0"
    one.locator("summary").click()
    one.locator("details td").first.wait_for()  # the table is filled once the browser tells that it is open
    assert one.locator("details td").all_inner_texts() == ["0.25", "0.1234567", "1", "0"]
    assert two.locator("canvas").get_attribute("aria-label") == "H0: 3 × 3, from 0 to 1"
    pixels = "(c) => [...c.getContext('2d').getImageData(30, 0, 1, 48).data]"
    drawn = np.array(one.locator("canvas").evaluate(pixels)).reshape(48, 4)
    assert (drawn[5] != drawn[40]).any()
    line = three.locator("canvas").evaluate("(c) => [...c.getContext('2d').getImageData(0, 2, c.width, 1).data]")
    red, _, blue, _ = np.array(line).reshape(3, -1, 4)[:, 5].T.tolist()  # of the middle of each cell
    assert red[0] < blue[0], "negative differences are blue"
    assert red[2] > blue[2], "positive ones are orange"
    assert abs(red[1] - blue[1]) < 10, "0 is in the middle of the scale, though −1 is further from it than 0.5"
    assert three.locator("canvas").get_attribute("aria-label") == "H0: 1 × 3, from -1 to 0.5"
    assert faults == []
    page.close()
