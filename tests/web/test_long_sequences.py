"""The heat map of 4,096 tokens: it pans and zooms, and its frames are timed."""

import statistics
import time

import httpx

TOKENS = 4096
COUNT = """() => {
  const frames = []; let last = performance.now();
  const tick = (now) => { frames.push(now - last); last = now; requestAnimationFrame(tick); };
  requestAnimationFrame(tick);
  return new Promise((done) => document.addEventListener("counted", () => done(frames), { once: true }));
}"""


def test_a_head_of_4096_tokens_pans_and_zooms(visit):
    config = {"d_model": 16, "num_heads": 2}
    assert httpx.post(f"{visit.url}/v1/modules", json={"name": "page-long", "config": config}).is_success
    began = time.perf_counter()
    page = visit.open(f"#/head?source=module:page-long&tokens={TOKENS}")
    canvas = page.locator(".stage canvas")
    canvas.wait_for(timeout=30_000)
    opened = time.perf_counter() - began
    canvas.focus()
    box = canvas.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + min(box["height"], 400) / 2
    page.evaluate(f"window.counting = ({COUNT})(); null")
    page.mouse.move(x, y)
    for _ in range(30):
        page.mouse.wheel(0, -40)
        page.wait_for_timeout(16)
    page.mouse.down()
    for step in range(30):
        page.mouse.move(x + 4 * step, y + 3 * step)
        page.wait_for_timeout(16)
    page.mouse.up()
    page.wait_for_url("**zoom=**")
    visit.picture("head-4096")
    page.evaluate("document.dispatchEvent(new Event('counted')); null")
    frames = sorted(page.evaluate("window.counting"))
    median, slow = statistics.median(frames), frames[int(0.95 * len(frames))]
    print(f"opened in {opened:.1f} s; {len(frames)} frames: median {median:.1f} ms, 19 of 20 within {slow:.1f} ms")
    assert median < 40  # measured: 16.7 ms, one frame at 60 Hz; tests share their machine
    httpx.delete(f"{visit.url}/v1/modules/page-long")
