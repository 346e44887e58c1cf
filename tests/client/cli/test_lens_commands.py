"""``attention models fit-lens`` tells the price, fits in parts, and stops at an interrupt."""

from contextlib import nullcontext

import numpy as np
import pytest

from attention_client.cli.commands import lens_commands
from attention_client.cli.invocation import Invocation
from attention_contract.schemas.analyses.lenses import LensInfo
from attention_contract.schemas.costs.model_complexity import ModelComplexityReply, PassCost
from tests.client.cli.command_line import invoke
from tests.client.service import URL

ID = "0" * 32
COST = PassCost(flops=2e9, bytes=1, peak_bytes=1, predicted_ms=300, predicted_low_ms=300, predicted_high_ms=300)


class Played:
    """A client whose model fits a lens in three calls, or is interrupted in the second."""

    def __init__(self, interrupted=False):
        self.models, self.interrupted = self, interrupted
        self.fits, self.deleted, self.priced = [], [], None

    def tokenize(self, model, text):
        self.longest = text
        return type("Tokens", (), {"count": 40})

    def complexity(self, model, length, **fields):
        self.priced = (length, fields)
        return ModelComplexityReply.model_construct(fit=COST)

    def fit_lens(self, model, texts, **fields):
        self.fits.append((texts, fields))
        if self.interrupted and len(self.fits) == 2:
            raise KeyboardInterrupt
        state = "ready" if len(self.fits) == 3 or texts is None else "fitting"
        return LensInfo(model=model, created="2026-01-01T00:00:00Z", id=ID, state=state, progress=len(self.fits) / 3)

    def delete_lens(self, lens):
        self.deleted.append(lens)


@pytest.fixture
def run(monkeypatch, tmp_path):
    (tmp_path / "texts.txt").write_text("a cat\n\na longer text\n", "utf-8")
    monkeypatch.chdir(tmp_path)

    def run(client, *arguments, **given):
        monkeypatch.setattr(lens_commands, "client_of", lambda ctx: nullcontext(client))
        return invoke(["models", "fit-lens", *arguments], **given)

    return run


def test_the_price_comes_before_a_fit_that_is_waited_for_in_parts(run):
    client = Played()
    result = run(client, "net", "texts.txt", "--skip-first", "2", "--max-tokens", "30")
    assert result.exit_code == 0, result.output
    assert "2 texts: about 2 GFLOP, 0.3 s" in result.stdout
    assert ID in result.stdout
    assert client.longest == "a longer text"
    assert client.priced == (30, {"batch": 2, "fit": True})
    texts, fields = zip(*client.fits, strict=True)
    assert texts == (["a cat", "a longer text"],) * 3
    assert [each.pop("wait_s") for each in fields] == [0, 0.5, 0.5]
    assert all(each == {"skip_first": 2, "max_tokens": 30} for each in fields)


def test_the_price_alone_fits_nothing(run):
    client = Played()
    result = run(client, "net", "-", "--price", input="one text\n")
    assert "predicted_ms" in result.stdout
    assert client.priced == (40, {"batch": 1, "fit": True})
    assert client.fits == []


def test_an_interrupt_stops_the_fit(run):
    client = Played(interrupted=True)
    assert run(client, "net", "texts.txt").exit_code != 0
    assert client.deleted == [ID]


def test_matrices_take_the_place_of_texts(run):
    client = Played()
    np.savez("given.npz", **{"0": np.eye(2, dtype=np.float32)})
    result = run(client, "net", "--jacobians", "given.npz", "--json")
    assert result.exit_code == 0, result.output
    ((texts, fields),) = client.fits
    assert texts is None
    np.testing.assert_array_equal(fields["jacobians"]["0"], np.eye(2))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "expected either a FILE of texts or --jacobians"),
        (("none.txt",), "there is no file none.txt"),
        (("empty.txt",), "has no text"),
        (("--jacobians", "given.npz", "--price"), "matrices are stored at once"),
    ],
)
def test_a_fit_of_nothing_is_refused_before_any_request(run, arguments, named):
    np.savez("given.npz", **{"0": np.eye(2, dtype=np.float32)})
    open("empty.txt", "w").close()
    result = run(None, "net", *arguments)
    assert result.exit_code == 2
    assert named in " ".join(result.output.replace("│", "").split())


def test_a_page_is_written_of_what_a_notebook_shows(played, tmp_path):
    def at_shell(*arguments):
        return invoke(["--url", URL, *arguments], obj=Invocation(transport=played.transport))

    np.save(tmp_path / "q.npy", np.ones((3, 8), np.float32))
    page = tmp_path / "w.html"
    result = at_shell("weights", "demo", "--query", str(tmp_path / "q.npy"), "--plot", str(page))
    assert result.exit_code == 0, result.output
    assert played.payload.return_weights
    assert page.read_text("utf-8").startswith("<!doctype html>")
    assert "application/json" in page.read_text("utf-8")
    assert at_shell("lens", "net", "cat", "--plot", str(page)).exit_code == 0
    assert "<caption>ModelLensReply</caption>" in page.read_text("utf-8"), "a reply without readings shows its fields"
    both = at_shell("weights", "demo", "--query", str(tmp_path / "q.npy"), "--plot", str(page), "--theme", "dark")
    assert "a page has no options of pictures" in " ".join(both.output.replace("│", "").split())
