"""Runner of the documents' code blocks: finds them, runs them against a server, and compares their outputs.

A ``python`` or ``sh`` block is run. The ``text`` or ``json`` block directly after it is its output. The blocks of one
document run in order, and its Python blocks share their names. ``console`` blocks are not run.

In an output, ``…`` matches anything. In JSON it matches any value, any further elements of a list, and, as a key, any
further fields of an object. In text it matches a part of a line, or, alone on a line, any number of lines. Numbers
that differ from run to run (``VOLATILE``) are not compared. Other decimals may differ in their last digit.

``python -m tools.docs.snippets [DOCUMENT …]`` runs the documents and rewrites changed outputs.
"""

import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
from markdown_it import MarkdownIt

from attention_client import Client
from tools.docs.command_process import command_folder

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DEFAULT_URL = "http://127.0.0.1:8000"
ELISION = "…"
VOLATILE = frozenset(
    {"kernel", "gradients_kernel", "decode_kernel", "predicted_ms", "predicted_low_ms", "predicted_high_ms"}
    | {"compute_ms", "cpu_ms", "queue_ms", "peak_bytes", "request_id", "device", "device_name", "memory", "predicted"}
    | {"time_exponent", "limits", "decode"}
)
"""Fields of replies that depend on the machine, its settings or the moment."""
SERVER_SETTINGS: dict[str, Any] = {"threads": 1, "mcp": True, "oip": True}
"""Settings of the server that answers the documents' code blocks; its memory budget is the default, as a reader's."""

_RAN = re.compile(r"^(?:fused|materialized) on \S+ (in .*?: [\d.]+ \w*FLOP), .*")
"""Match the command's line about the execution. Dtype, version and FLOPs are compared; times and bytes are not."""
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w…])")


@dataclass(frozen=True)
class Block:
    """One block of code, with its output if one follows directly."""

    document: Path
    language: str
    code: str
    line: int
    """Number of the first line of code, from 1."""
    output: str | None = None
    output_language: str = ""
    output_lines: tuple[int, int] | None = None
    """The lines of the document between the fences of the output, from 0."""

    @property
    def place(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


class SnippetError(AssertionError):
    """A block failed, or its output differs from the document."""


def blocks(document: Path) -> Iterator[Block]:
    """Yield every block of code of a document except outputs."""
    tokens = MarkdownIt().parse(document.read_text("utf-8"))
    at = 0
    while at < len(tokens):
        token, at = tokens[at], at + 1
        if token.type != "fence":
            continue
        found: dict[str, Any] = {}
        if token.info in {"python", "sh"} and at < len(tokens) and tokens[at].type == "fence":
            follows = tokens[at]
            if follows.info in {"text", "json"}:
                start, end = follows.map
                found = {
                    "output": follows.content,
                    "output_language": follows.info,
                    "output_lines": (start + 1, end - 1),
                }
                at += 1
        yield Block(document, token.info, token.content, token.map[0] + 2, **found)


@dataclass
class Session:
    """State that the blocks of one document share: a server, a folder, and Python's names."""

    url: str
    models_dir: Path
    folder: Path
    printing: dict[str, Any] = field(default_factory=lambda: dict(np.get_printoptions()))
    """How numpy prints, which a block may change and the next document must not see."""
    main: ModuleType = field(default_factory=lambda: ModuleType("__main__"))
    """The module ``__main__`` of the Python blocks, where a compiler of functions looks their names up."""

    @property
    def names(self) -> dict[str, Any]:
        return vars(self.main)

    def run(self, block: Block) -> str:
        """Run a block and return its output. Raises SnippetError if it fails."""
        code = block.code.replace(DEFAULT_URL, self.url)
        printed = self._python(block, code) if block.language == "python" else self._shell(block, code)
        return printed.replace(self.url, DEFAULT_URL)

    @property
    def _environment(self) -> dict[str, str]:
        return {
            "ATTENTION_URL": self.url,
            "ATTENTION_MODELS_DIR": str(self.models_dir),
            "PATH": os.pathsep.join([str(command_folder()), str(Path(sys.executable).parent), os.environ["PATH"]]),
        }

    def _python(self, block: Block, code: str) -> str:
        out = io.StringIO()
        # Not sys.stdout: a test's server runs in this process and logs to it.
        self.names["print"] = partial(print, file=out)
        padded = "\n" * (block.line - 1) + code  # so that a traceback names the document's lines
        runner = sys.modules["__main__"]
        with mock.patch.dict(os.environ, self._environment), chdir(self.folder):
            try:
                sys.modules["__main__"] = self.main
                exec(compile(padded, str(block.document), "exec"), self.names)  # noqa: S102
            except Exception:
                raise SnippetError(f"{block.place} failed\n{traceback.format_exc()}") from None
            finally:
                sys.modules["__main__"] = runner
        return out.getvalue()

    def _shell(self, block: Block, code: str) -> str:
        done = subprocess.run(
            ["/bin/bash", "-uo", "pipefail", "-c", code],
            env={**os.environ, **self._environment, "NO_COLOR": "1", "COLUMNS": "100"},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=300,
            check=False,
        )
        if done.returncode:
            raise SnippetError(f"{block.place} ended with {done.returncode}\n{done.stdout}")
        return done.stdout

    def close(self) -> None:
        """Close clients that the Python blocks left open."""
        np.set_printoptions(**self.printing)
        for value in self.names.values():
            if isinstance(value, Client):
                value.close()


def check(block: Block, printed: str) -> None:
    """Raise SnippetError unless a block's output matches the document."""
    if block.output is None:
        return
    found = (
        json_difference(_json(block.output), _json(printed), "")
        if block.output_language == "json"
        else _text_difference(block.output, printed)
    )
    if found is not None:
        raise SnippetError(f"{block.place} printed something else: {found}\n── printed ──\n{printed}")


def _json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as fault:
        raise SnippetError(f"not JSON ({fault}): {text}") from None


def _object(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Raises SnippetError for a key that is there twice."""
    found = dict(fields)
    if len(found) < len(fields):
        raise SnippetError(f"a key twice among {', '.join(name for name, _ in fields)}")
    return found


def json_difference(shown: Any, printed: Any, path: str) -> str | None:
    """Describe the first difference of two JSON values; None if they are equal."""
    if shown == ELISION:
        return None
    if isinstance(shown, Mapping) and isinstance(printed, Mapping):
        return _object_difference(shown, printed, path)
    if isinstance(shown, list) and isinstance(printed, list):
        return _list_difference(shown, printed, path)
    if type(shown) is type(printed) and shown == printed:
        return None
    floats = {type(shown), type(printed)} in ({float}, {int, float})  # two integers are equal or wrong
    if floats and math.isclose(shown, printed, rel_tol=1e-5, abs_tol=1e-6):
        return None
    return f"{path or 'the value'} is {json.dumps(printed)[:200]}, shown as {json.dumps(shown)[:200]}"


def _object_difference(shown: Mapping[str, Any], printed: Mapping[str, Any], path: str) -> str | None:
    missing = set(shown) - set(printed) - {ELISION}
    more = set() if ELISION in shown else set(printed) - set(shown)
    if missing or more:
        return f"{path or 'the object'} lacks {sorted(missing)}, has besides {sorted(more)}"
    same = (name for name in shown if name != ELISION and name not in VOLATILE)
    return next(filter(None, (json_difference(shown[name], printed[name], f"{path}.{name}") for name in same)), None)


def _list_difference(shown: Sequence[Any], printed: Sequence[Any], path: str) -> str | None:
    if ELISION in shown:
        at = shown.index(ELISION)
        behind = len(shown) - at - 1
        if len(printed) < at + behind:
            return f"{path} has {len(printed)} elements"
        shown = [*shown[:at], *shown[at + 1 :]]
        printed = [*printed[:at], *printed[len(printed) - behind :]]
    if len(shown) != len(printed):
        return f"{path} has {len(printed)} elements, shown with {len(shown)}"
    pairs = enumerate(zip(shown, printed, strict=True))
    return next(filter(None, (json_difference(a, b, f"{path}[{at}]") for at, (a, b) in pairs)), None)


def _text_difference(shown: str, printed: str) -> str | None:
    wanted, found = shown.rstrip().splitlines(), printed.rstrip().splitlines()
    at = 0
    for index, line in enumerate(wanted):
        if line.strip() == ELISION:
            later = wanted[index + 1 :]
            if not later:
                return None
            while at < len(found) and not _line_matches(later[0], found[at]):
                at += 1
        elif at >= len(found):
            return f"the line {line!r} is missing"
        elif not _line_matches(line, found[at]):
            return f"{found[at]!r}, shown as {line!r}"
        else:
            at += 1
    return None if at == len(found) else f"there is more: {found[at]!r}"


def _line_matches(shown: str, printed: str) -> bool:
    """Return True if a line matches, except for runs of spaces and the last digit of a decimal."""
    shown, printed = (_RAN.sub(r"ran \1", line) for line in (shown, printed))
    numbers: list[str] = []

    def remember(match: re.Match[str]) -> str:
        numbers.append(match[0])
        return "\0"

    pattern = re.escape(_NUMBER.sub(remember, " ".join(shown.split())))
    pattern = pattern.replace(re.escape(ELISION), ".*?").replace("\0", f"({_NUMBER.pattern})")
    match = re.fullmatch(pattern, " ".join(printed.split()))
    return match is not None and all(map(_same_number, numbers, match.groups()))


def _same_number(shown: str, printed: str) -> bool:
    if "." not in shown and "e" not in shown:
        return shown == printed
    digits, _, exponent = shown.partition("e")
    last = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
    return abs(float(shown) - float(printed)) <= 1.01 * last


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def pretty(value: Any, indent: int = 0, width: int = 110) -> str:
    """JSON over several lines, with whatever fits on one line on one."""
    flat = json.dumps(value, ensure_ascii=False)
    if len(flat) + indent <= width or not isinstance(value, dict | list) or not value:
        return flat
    inner = " " * (indent + 2)
    if isinstance(value, dict):
        items = [f"{json.dumps(name, ensure_ascii=False)}: {pretty(item, indent + 2)}" for name, item in value.items()]
        first, last = "{}"
    else:
        items = [pretty(item, indent + 2) for item in value]
        first, last = "[]"
    return f"{first}\n" + ",\n".join(inner + item for item in items) + f"\n{' ' * indent}{last}"


def update(document: Path, session: Session) -> int:
    """Run a document and write every output that has changed into it. Returns how many did."""
    lines = document.read_text("utf-8").splitlines()
    changes: list[tuple[tuple[int, int], str]] = []
    for block in blocks(document):
        if block.language not in {"python", "sh"}:
            continue
        printed = session.run(block)
        try:
            check(block, printed)
        except SnippetError:
            assert block.output_lines is not None
            new = pretty(json.loads(printed)) if block.output_language == "json" else printed.rstrip()
            changes.append((block.output_lines, _keeping(lines[slice(*block.output_lines)], new)))
    for (start, end), new in reversed(changes):
        lines[start:end] = [line.rstrip() for line in new.splitlines()]
    document.write_text("\n".join(lines) + "\n", "utf-8")
    return len(changes)


def _keeping(shown: Sequence[str], new: str) -> str:
    """The new output with those lines of the shown one that still hold, in which … may stand for what varies."""
    printed = new.splitlines()
    if len(printed) != len(shown):
        return new
    return "\n".join(old if _line_matches(old, line) else line for old, line in zip(shown, printed, strict=True))


def main(names: Sequence[str]) -> None:
    """Bring the named documents (all of them, where none is named) up to date."""
    from tests.conftest import live_server

    from attention_service.api.observation.log_setup import configure_logging

    configure_logging("error", "console")
    for document in [Path(name).resolve() for name in names] or DOCUMENTS:
        with (
            tempfile.TemporaryDirectory() as models,
            tempfile.TemporaryDirectory() as folder,
            live_server(Path(models), **SERVER_SETTINGS) as url,
        ):
            session = Session(url, Path(models), Path(folder))
            try:
                print(document.relative_to(ROOT), "outputs changed:", update(document, session))
            finally:
                session.close()


if __name__ == "__main__":
    main(sys.argv[1:])
