"""Every example with a figure draws it and confirms its claims."""

import re
import sys

import pytest
from tests.examples.test_examples import EXAMPLES, succeed
from tools.docs.snippets import ROOT, Block, check

MAX_BYTES = 60_000
FIGURES = (
    "alignment", "heads_that_link", "hopfield_completion", "kernel_regression", "softmax_saturation", "steering",
    "stop_at_a_name", "window_cost",
)  # fmt: skip


def shown(name: str) -> Block:
    """Return the output that docs/examples.md shows for an example."""
    page = ROOT / "docs" / "examples.md"
    _, _, section = page.read_text("utf-8").partition(f"[{name}.py]")
    return Block(page, "sh", name, 1, section.partition("```text\n")[2].partition("```")[0], "text")


@pytest.fixture
def draw(server, tmp_path):
    """Run an example, check its figure, and return its output."""

    def run(name: str) -> str:
        printed = succeed(sys.executable, EXAMPLES / f"{name}.py", "--output", tmp_path / "new", ATTENTION_URL=server)
        assert_small_png((tmp_path / "new" / f"{name}.png").read_bytes())
        check(shown(name), printed)
        return printed

    return run


def assert_small_png(content: bytes) -> None:
    assert content.startswith(b"\x89PNG")
    assert 5_000 < len(content) < MAX_BYTES


def numbers(printed: str, of: str) -> list[float]:
    """Return the numbers of the line with this beginning."""
    line = next(line for line in printed.splitlines() if line.startswith(of)).removeprefix(of)
    return [float(number) for number in re.findall(r"(?<![\w.])-?\d[\d.]*(?:e[+-]?\d+)?", line.replace(",", ""))]


@pytest.mark.parametrize("name", FIGURES)
def test_the_committed_figure_is_small(name):
    assert_small_png((EXAMPLES / "figures" / f"{name}.png").read_bytes())


@pytest.mark.slow
def test_every_corrupted_letter_is_retrieved_and_a_small_beta_mixes_all(draw):
    printed = draw("hopfield_completion")
    corrupted, retrieved = numbers(printed, "pixels right:")
    assert corrupted < 0.7
    assert retrieved == 1
    assert numbers(printed, "letters right:") == [26, 26, 26]
    assert numbers(printed, "largest rise of an energy:")[0] < 1e-12
    mixed_blunt, _, mixed_sharp, _ = numbers(printed, "mixtures:")
    assert mixed_blunt > 25.9
    assert mixed_sharp < 1.1


@pytest.mark.slow
def test_the_variance_is_d_and_the_scale_keeps_the_gradient(draw):
    printed = draw("softmax_saturation")
    rows = {int(row[0]): row[1:] for row in (numbers(line, "") for line in printed.splitlines()[2:7])}
    for width, (variance, plain, scaled, entropy, scaled_entropy, gradient, scaled_gradient) in rows.items():
        assert variance == pytest.approx(width, rel=0.05)
        assert scaled == pytest.approx(0.068, abs=0.01), "the scaled scores look alike at every width"
        assert scaled_entropy == pytest.approx(4.37, abs=0.05)
        assert scaled_gradient == pytest.approx(0.125, abs=0.015)
        assert plain > scaled
        assert entropy < scaled_entropy
        if width >= 256:
            assert gradient < scaled_gradient / 5
    assert set(rows) == {4, 16, 64, 256, 1024}


@pytest.mark.slow
def test_a_window_costs_its_width_and_loses_little_where_near_tokens_are_alike(draw):
    printed = draw("window_cost")
    dense, narrow = numbers(printed, "dense:"), numbers(printed, "window:")
    assert dense[0] > 10 * narrow[0]
    assert "n^2.00" in printed
    assert "n^1.0" in printed
    near, far = (numbers(printed, f"lost, {name} tokens")[::2] for name in ("near", "independent"))
    assert len(re.findall(r" window: .* ms at 2048", printed)) >= 2, "every kernel that can do it is measured"
    blocked = {name: numbers(printed, f"blocked {name}:")[-2] for name in ("dense", "window")}
    assert blocked["window"] < blocked["dense"] / 2, "the blocked kernel skips what the mask forbids"
    assert near[0] > near[2]
    assert near[2] < 0.005 < 0.5 < far[2]


@pytest.mark.slow
def test_the_learned_bandwidth_beats_fixed_ones(draw):
    printed = draw("kernel_regression")
    errors = [numbers(line, "held-out error:")[0] for line in printed.splitlines() if line.startswith("held-out")]
    learned, *fixed = errors
    assert len(fixed) == 4
    assert all(learned < 0.95 * error for error in fixed)
    assert learned < 1.1 * numbers(printed, "best of a grid on the held-out points:")[0]
    assert numbers(printed, "learned sigma:")[-1] < 1e-2, "it has settled"


@pytest.mark.slow
def test_the_alignment_becomes_anti_diagonal(draw):
    printed = draw("alignment")
    before, _, after = (
        [float(x) for x in found] for found in re.findall(r"step \d+: ([\d.]+) .*, ([\d.]+) of", printed)
    )
    assert max(before) < 0.3
    assert after[0] >= 0.95
    assert after[1] >= 0.95


@pytest.mark.slow
def test_one_head_looks_at_the_names_before_one_is_repeated(draw):
    printed = draw("heads_that_link")
    assert printed.startswith("from before a repeated name: L1H0 ")
    assert numbers(printed, "from before a repeated name: L1H0")[0] > 0.4


@pytest.mark.slow
def test_a_probe_tells_that_a_name_comes_and_ends_the_text_at_it(draw):
    printed = draw("stop_at_a_name")
    assert numbers(printed, "AUC of L1H0's weight at names:")[0] > 0.95
    texts = [line.partition("stop: ")[2] for line in printed.splitlines() if line.startswith("stop: ")]
    assert len(texts) == 2
    for text in texts:
        before, _, added = text.partition("|")
        assert added.split()[-1] in before


@pytest.mark.slow
def test_a_steering_vector_moves_the_margin_with_its_scale(draw):
    printed = draw("steering")
    margins = [numbers(re.sub(r"after layer \d", "", printed), f"margin at scale {scale}:") for scale in (-3, 0, 3)]
    assert all(low < none < high for low, none, high in zip(*margins, strict=True))
