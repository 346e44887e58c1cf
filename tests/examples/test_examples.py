"""Every example runs from the command line, and its claims hold."""

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
import tomllib
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import torch
from platformdirs import user_cache_path
from tests.api.processes import process
from tests.conftest import live_server
from transformers import BertConfig, BertModel

EXAMPLES = Path(__file__).parents[2] / "examples"
MINILM = user_cache_path("attention-service", appauthor=False) / "minilm"
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "mat", "##s", "."]


def run(*command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in {"SENTENCE", "CHECKPOINT"}}
    inherited |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    return subprocess.run(
        [str(part) for part in command], env=inherited | env, capture_output=True, text=True, timeout=300, check=False
    )


def succeed(*command: str | Path, **env: str) -> str:
    done = run(*command, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def difference(printed: str, of: str) -> float:
    """Return the number in a printed line that contains ``of``."""
    found = re.search(rf"{of}.*?(\d\.\de[+-]\d+)", printed)
    assert found, printed
    return float(found[1])


# ── examples that ask a running service ──────────────────────────────────────────────────────────────────────────────


def test_the_quickstart_answers_the_four_questions(server):
    printed = succeed(sys.executable, EXAMPLES / "quickstart.py", ATTENTION_URL=server)
    assert "output (1, 5, 64)" in printed
    assert printed.count("passed") == 10
    assert "O(n²" in printed


@pytest.mark.slow
def test_capacity_plans_for_absent_hardware(server, tmp_path):
    picture = tmp_path / "capacity.svg"
    printed = succeed(sys.executable, EXAMPLES / "capacity.py", "--picture", picture, ATTENTION_URL=server)
    gibs = dict(re.findall(r"(\w+ ?\w* ?\w*) 131072 tokens: cache +([\d.]+) GiB", printed))
    assert gibs == {"request": "64.0", "grouped heads": "16.0", "one kv head": "2.0"}  # Llama-3 8B: 128 KiB a token
    steps = [float(ms) for ms in re.findall(r"131072 tokens.*then +([\d.]+) ms a token", printed)]
    assert steps == sorted(steps, reverse=True), "a smaller cache is read sooner"
    for device in ("L4", "A100 SXM 80GB", "H100 SXM", "MI300X"):
        assert re.search(rf"{device}: +[\d.]+ ms \([\d.]+ to [\d.]+\), up to [\d,]+ tokens", printed)
    assert re.search(r"(window|request) is faster from \d+ tokens on", printed)
    assert picture.read_text("utf-8").startswith("<?xml")


@pytest.mark.slow
def test_hiding_a_source_agrees_best_with_leaving_it_out(server):
    printed = succeed(sys.executable, EXAMPLES / "context_agreement.py", ATTENTION_URL=server)
    rows = {name: float(found) for name, found in re.findall(r"^(\w+) +(-?\d\.\d\d) +\d+%$", printed, re.MULTILINE)}
    assert rows.keys() == {"hidden", "attention", "gradient"}
    assert max(rows, key=rows.__getitem__) == "hidden"


@pytest.mark.slow
def test_knocking_heads_out_finds_those_that_copy(server):
    printed = succeed(sys.executable, EXAMPLES / "knock_out_a_head.py", ATTENTION_URL=server)
    assert "right without an edit: 100%" in printed
    assert difference(printed, "logits on the service and here") < 1e-4
    rows = re.findall(r"^ +(\d) +(\d) +([\d.]+) +([\d.]+) +([\d.]+) +(\d+)%$", printed, re.MULTILINE)
    assert len(rows) == 8
    copying = max(rows, key=lambda row: float(row[3]))
    worst = min(rows, key=lambda row: int(row[5]))
    assert copying[0] == worst[0] == "1", "the second layer copies"
    assert float(copying[3]) > 0.9
    assert int(worst[5]) < 90
    assert all(float(row[4]) > 0 for row in rows)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_quickstart_does_the_same_with_curl(server):
    printed = succeed("sh", EXAMPLES / "quickstart.sh", ATTENTION_URL=server)
    for field in ('"version"', '"output"', '"statistics"', '"gradients"', '"growth"'):
        assert field in printed


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_quickstart_with_curl_stops_at_a_refusal():
    assert run("sh", EXAMPLES / "quickstart.sh", ATTENTION_URL="http://127.0.0.1:1").returncode != 0


def test_the_example_kernel_has_the_exact_numbers(server):
    printed = succeed(sys.executable, EXAMPLES / "check_a_kernel.py", ATTENTION_URL=server)
    for name in ("output", "lse", "query", "key", "value"):
        assert difference(printed, name) < 1e-12


@pytest.fixture
def with_the_kernel_package(tmp_path: Path) -> str:
    """A search path on which the example's package is installed."""
    package = EXAMPLES / "kernel_package"
    project = tomllib.loads((package / "pyproject.toml").read_text("utf-8"))["project"]
    ((group, points),) = project["entry-points"].items()
    info = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *(f"{a} = {b}" for a, b in points.items())]) + "\n")
    return os.pathsep.join([str(tmp_path), str(package), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.mark.slow
def test_a_kernel_of_an_installed_package_is_served_by_its_name_and_compared(with_the_kernel_package, tmp_path):
    with process(tmp_path, PYTHONPATH=with_the_kernel_package, OMP_NUM_THREADS="1") as (_, url):

        def attention(*arguments: str) -> str:
            command = "from attention_client.cli import main; main()"
            return succeed(sys.executable, "-c", command, "--url", url, *arguments)

        causal = '{"masks": [{"name": "causal"}]}'
        printed = attention("compare", "online_softmax", "--dtype", "float64", "--spec", causal, "--kv-heads", "2")
        assert printed.count("passed") == 4
        assert "online_softmax" in printed
        assert "online_softmax" in attention("variants")
        cost = attention("complexity", "--queries", "300", "--num-heads", "4", "--head-dim", "16", "--json")
        assert '"kernel":"online_softmax"' not in cost.replace(" ", ""), "it runs only where a request names it"


@pytest.mark.slow
def test_an_imported_pytorch_module_gives_the_same_numbers(tmp_path):
    with live_server(tmp_path) as url:
        printed = succeed(
            sys.executable, EXAMPLES / "pytorch_module.py", ATTENTION_URL=url, ATTENTION_MODELS_DIR=str(tmp_path)
        )
    assert difference(printed, "output") < 1e-6
    assert difference(printed, "weights") < 1e-6


@pytest.mark.slow
def test_training_through_the_service_follows_the_local_losses(tmp_path):
    with live_server(tmp_path) as url:
        printed = succeed(sys.executable, EXAMPLES / "train_remote.py", "--steps", "250", ATTENTION_URL=url)
    first, *_, last = re.findall(r"^ *\d+ +(\S+) +(\S+) +(\S+)$", printed, re.MULTILINE)
    assert float(last[0]) < float(first[0]) * 0.1
    largest = float(printed.rpartition("steps: ")[2])
    assert largest < 1e-4


@pytest.mark.slow
def test_text_is_decoded_with_its_past_in_sessions(server):
    printed = succeed(
        sys.executable, EXAMPLES / "decode_text.py", "--steps", "200", "--characters", "30", ATTENTION_URL=server
    )
    assert difference(printed, "logits with sessions and here") < 1e-4
    lines = re.findall(r"^'.+?' +(\d) +(\d+) '.*?' +(\d+)% +(\d) +(\d+) .* (\d+)%$", printed, re.MULTILINE)
    places = [int(place) for line in lines for place in (line[1], line[4])]
    assert len(lines) == 30
    assert all(place < len("This is the dog") + i // 2 for i, place in enumerate(places)), "no character looks ahead"
    right = re.search(r"(\d+) of 30 characters as in the rhyme", printed)
    assert right
    assert int(right[1]) == 30
    left = httpx.get(f"{server}/v1/modules").json()["modules"]
    assert not [module["name"] for module in left if module["name"].startswith("decode-text")]


@pytest.mark.slow
def test_a_prompt_that_the_rhyme_cannot_continue_is_refused():
    done = run(sys.executable, EXAMPLES / "decode_text.py", "--prompt", "the rÜt")
    assert done.returncode == 2
    assert "--prompt: the rhyme has no ['Ü']" in done.stderr


@pytest.mark.slow
def test_a_terminal_shows_the_text_with_the_weights_as_shades(server):
    """The terminal is 90 columns wide; the output of every step replaces the one before."""
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 90, 0, 0))
    done = subprocess.Popen(
        [sys.executable, EXAMPLES / "decode_text.py", "--steps", "5", "--characters", "4", "--pause", "0"],
        env=os.environ | {"ATTENTION_URL": server, "TERM": "xterm-256color", "COLORTERM": "truecolor"},
        stdout=terminal,
    )
    os.close(terminal)
    printed = b""
    with suppress(OSError):  # the terminal is closed at the end
        while part := os.read(screen, 65536):
            printed += part
    assert done.wait(60) == 0
    drawn = printed.decode()
    assert drawn.count("layer 1") == 4 + 1, "and once more at the end"
    assert "\x1b[48;2;230;100;30m" in drawn, "the place of most weight"


# ── the demo ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a random encoder with BERT's layout, and a tokenizer for one sentence."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny-bert"
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        initializer_range=0.5,  # uneven weights, as in a trained encoder
    )
    BertModel(config).eval().save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": true}')
    return folder


def demo(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, EXAMPLES / "demo.py", *arguments, COLUMNS="100", **env)


def agreed(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(done.stdout, "weights of all heads and layers") <= 1e-5
    assert difference(done.stdout, "final hidden state") <= 1e-4
    return done.stdout


@pytest.mark.slow
def test_the_demo_agrees_with_transformers(tiny_bert):
    printed = agreed(demo("--checkpoint", tiny_bert))
    assert "imported tiny-bert.0 tiny-bert.1" in printed
    assert "[CLS] the cat sat on the mat [SEP]" in printed
    assert printed.count("rows look at columns") == 1
    assert "share of the first key, [CLS]" in printed
    assert "\x1b" not in printed


@pytest.mark.slow
def test_the_demo_uses_a_running_service(tiny_bert, tmp_path):
    """Variables of the environment name the checkpoint and the sentence, as in `make demo`."""
    shutil.copytree(tiny_bert, tmp_path / "kept" / "tiny")
    with live_server(tmp_path) as url:
        printed = agreed(
            demo(
                "--url", url, "--stored-as", "kept/tiny", "--all", CHECKPOINT=str(tiny_bert), SENTENCE="the mats " * 15
            )
        )
    assert "[CLS] the mat ##s the mat ##s" in printed
    assert printed.count("rows look at columns") == 8


@pytest.mark.slow
def test_the_demo_reports_a_missing_config(tmp_path):
    done = demo("--checkpoint", tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("demo: ")
    assert "config.json" in done.stderr


@pytest.mark.slow
def test_the_demo_fails_if_the_numbers_differ(tiny_bert, tmp_path):
    """A checkpoint with other weights in the service fails the comparison."""
    other = shutil.copytree(tiny_bert, tmp_path / "tiny-bert")
    torch.manual_seed(1)
    BertModel(BertConfig.from_pretrained(tiny_bert)).save_pretrained(other)
    with live_server(tmp_path) as url:
        done = demo("--checkpoint", tiny_bert, "--url", url)
    assert done.returncode == 1
    assert "does NOT agree" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not MINILM.is_dir(), reason="needs MiniLM in the cache folder; `make demo` fetches it")
def test_the_demo_agrees_on_minilm():
    printed = agreed(demo())
    assert "minilm.5" in printed
    assert "[CLS] the cat sat on the mat [SEP]" in printed
