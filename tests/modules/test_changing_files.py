"""Files of the model repository that are no files, or that change while they are read: the process goes on."""

import ast
import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.modules.gguf_bytes import entry, gguf, strings

import attention_service
from attention_contract.errors import InvalidCheckpoint
from attention_service.models.folders import model_catalogue
from attention_service.modules.checkpoints.forms.gguf import gguf_header

SERVICE = Path(attention_service.__file__).parent
SECONDS = 60
"""After which a child process hangs."""
OVERWRITES = 20

READING = """
import json
import sys
from pathlib import Path
from attention_contract.errors import AttentionError
from attention_contract.schemas.modules import ImportModule
from attention_service.models.folders import model_catalogue
from attention_service.modules.checkpoints import catalogue, import_plan
from attention_service.modules.checkpoints.forms.gguf import gguf_header
def ask(root, number):
    gguf_header._read.cache_clear()
    answered = 0
    for read in (
        lambda: model_catalogue.all_with_adapters(root, model_catalogue.listed(root), {}),
        lambda: catalogue.listed(root),
        lambda: import_plan.plan(root, ImportModule(checkpoint="gpt2", layer=0)).read(),
    ):
        try:
            read()
        except AttentionError:
            pass
        answered += 1
    print(number, answered, flush=True)

for line in sys.stdin:
    root, rounds = json.loads(line)
    for number in range(rounds):
        ask(Path(root), number)
"""
"""Asks for the lists and imports a layer, again and again. Every question has its answer, or a refusal."""


@pytest.fixture(scope="module")
def reader():
    """A process that reads what it is told to; its imports take seconds."""
    command = [sys.executable, "-c", READING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        yield child
        child.kill()


def begin(reader, root, rounds):
    reader.stdin.write(json.dumps([str(root), rounds]) + "\n")
    reader.stdin.flush()


def ended_round(reader):
    """The number of a round, and of its answers."""
    assert select.select([reader.stdout], [], [], SECONDS)[0], "it hangs"
    return tuple(map(int, reader.stdout.readline().split()))


def gpt2(folder, width=256):
    folder.mkdir(exist_ok=True)
    config = {"model_type": "gpt2", "n_embd": width, "n_head": 4, "n_layer": 1, "architectures": ["GPT2LMHeadModel"]}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        "h.0.attn.c_attn.weight": torch.zeros(width, 3 * width), "h.0.attn.c_attn.bias": torch.zeros(3 * width),
        "h.0.attn.c_proj.weight": torch.zeros(width, width), "h.0.attn.c_proj.bias": torch.zeros(width),
    }  # fmt: skip
    save_file(tensors, folder / "model.safetensors")


def test_only_one_place_opens_tensors_and_nothing_of_the_repository_is_mapped():
    """``reply_memory`` maps memory that the server shares with a model, and ``slab`` maps no file."""
    mapping, opening = set(), set()
    texts = {file: file.read_text("utf-8") for file in SERVICE.rglob("*.py")}
    for file in [file for file, text in texts.items() if "mmap" in text or "safe_open" in text]:
        for node in ast.walk(ast.parse(texts[file])):
            if isinstance(node, ast.Import) and any(each.name == "mmap" for each in node.names):
                mapping.add(file.name)
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "safe_open":
                opening.add(file.name)
                assert [each.value.value for each in node.keywords if each.arg == "backend"] == ["pread"]
    assert mapping == {"reply_memory.py", "slab.py"}
    assert opening == {"store_files.py"}


def bound(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.fspath(path))


KINDS = {
    "pipe": os.mkfifo,
    "socket": bound,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "loop": lambda path: path.symlink_to(path.name),
    "link out": lambda path: path.symlink_to(Path(__file__)),
    "unreadable": lambda path: path.touch(0),
}
NAMES = (
    "model.safetensors", "x.gguf", "config.json", "adapter_config.json", "adapter_model.safetensors",
    "model.safetensors.index.json", "open_clip_config.json", "tokenizer.json", "tokenizer_config.json", "modules.json",
    "preprocessor_config.json", "generation_config.json",
)  # fmt: skip


@pytest.mark.long
def test_what_is_no_file_is_refused_in_the_lists_and_holds_nobody_up(reader, tmp_path, monkeypatch):
    """Each name that a reader looks for × each kind of thing that may stand there, alone and beside a checkpoint."""
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    gpt2(tmp_path / "gpt2")
    for number, name in enumerate(NAMES):
        for kind, make in KINDS.items():
            for beside in (False, True):
                folder = Path(f"{number}-{kind}-{beside}")
                if beside:
                    gpt2(folder)
                    (folder / name).unlink(missing_ok=True)
                folder.mkdir(exist_ok=True)
                make(folder / name)
        os.mkfifo(f"{number}.gguf")
        os.mkfifo(f"{number}.safetensors")
    begin(reader, tmp_path, 1)
    assert ended_round(reader) == (0, 3)


@pytest.mark.long
def test_files_that_are_cut_and_written_in_place_end_no_process(reader, tmp_path):
    """A map of such a file ends the process that reads it, by SIGBUS; so it is tried in a process of its own."""
    gpt2(tmp_path / "gpt2")
    (tmp_path / "llama").mkdir()
    many = gguf(entry("tokenizer.ggml.tokens", strings(["▁the"] * 40_000)))
    (tmp_path / "llama" / "m.gguf").write_bytes(many)
    changing = [tmp_path / "gpt2" / "model.safetensors", tmp_path / "llama" / "m.gguf"]
    whole = {file: file.read_bytes() for file in changing}
    begin(reader, tmp_path, 10**6)
    for number in range(OVERWRITES):
        for file, content in whole.items():
            os.truncate(file, len(content) // (2 + number))
            assert ended_round(reader)[1:] == (3,), f"ended after {number} overwrites: {reader.poll()}"
            with file.open("r+b") as opened:
                opened.write(content)
            assert reader.poll() is None, f"ended after {number} overwrites: {reader.returncode}"
    reader.kill()  # the last test that needs it


def test_a_list_looks_once_at_a_folder_of_many_files(tmp_path, monkeypatch):
    looks = {"link_out": 0, "unread_beside": 0, "read": 0}

    def counted(name, own):
        def look(*args):
            looks[name] += 1
            return own(*args)

        return look

    for name in ("link_out", "unread_beside"):
        monkeypatch.setattr(model_catalogue, name, counted(name, getattr(model_catalogue, name)))
    monkeypatch.setattr(gguf_header, "open_regular", counted("read", gguf_header.open_regular))
    (tmp_path / "many").mkdir()
    for number in range(80):
        (tmp_path / "many" / f"{number}.gguf").write_bytes(gguf() if number % 2 else b"GGUF" + bytes(40))
    gguf_header._read.cache_clear()
    first = model_catalogue.listed(tmp_path)
    assert len(first) == 81  # and the one that ships
    assert sum("not a readable GGUF file" in (each.refused or "") for each in first) == 40
    assert looks == {"link_out": 1, "unread_beside": 1, "read": 80}
    model_catalogue.listed(tmp_path)
    assert looks["read"] == 80  # refusals are remembered too
    file = tmp_path / "many" / "0.gguf"
    file.write_bytes(gguf())
    os.utime(file, ns=(0, time.time_ns()))
    assert sum("not a readable GGUF file" in (each.refused or "") for each in model_catalogue.listed(tmp_path)) == 39


@pytest.mark.parametrize("count", [2**22 - 1, 2**22 + 1, 2**63])
@pytest.mark.parametrize("kind", [0, 8, 12])
def test_a_header_that_claims_more_than_its_file_is_refused_after_what_there_is(tmp_path, monkeypatch, kind, count):
    taken, most = gguf_header._HeaderReader.taken, 32_768
    calls = []

    def counted(reader, size):
        calls.append(size)
        return taken(reader, size)

    monkeypatch.setattr(gguf_header._HeaderReader, "taken", counted)
    file = tmp_path / "x.gguf"
    file.write_bytes(gguf(entry("tokenizer.ggml.tokens", (9, claimed(kind, count)))) + bytes(most))
    with pytest.raises(InvalidCheckpoint, match=r"x\.gguf is not a readable GGUF file"):
        gguf_header.read_header(file)
    assert len(calls) < most


def claimed(kind, count):
    return kind.to_bytes(4, "little") + count.to_bytes(8, "little")


def test_a_long_array_of_numbers_is_not_kept(tmp_path):
    file = tmp_path / "x.gguf"
    for count in (2**12, 2**12 + 1):
        numbers = (9, claimed(4, count) + bytes(4 * count))
        file.write_bytes(gguf(entry("llama.own", numbers), entry("llama.last", (4, bytes([7, 0, 0, 0])))))
        header = gguf_header.read_header(file)
        assert header.of_model("own") == ([0] * count if count == 2**12 else gguf_header.UnkeptArray(count))
        assert header.of_model("last") == 7
