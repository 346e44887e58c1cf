"""Suites that others keep, which npm runs against a server of this project: those of MCP and of Open Responses.

A suite whose runner cannot be had, for want of npm or of a network, is skipped. The scenarios that are refused are
listed, each with its reason; one that fails and is not listed is a fault, and so is one that is listed and passes.
"""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.api.processes import process
from tests.models.inputs.images import small_prompts
from transformers import GenerationConfig

from tools.interop.environment import ENVIRONMENT

MCP: Final = "@modelcontextprotocol/conformance@0.1.13"
"""The newest that runs on Node 20."""
OPEN_RESPONSES: Final = "https://github.com/openresponses/openresponses", "18e565604fdf7a08ad3a06bbc30d1ddaee999ea4"
_TYPESCRIPT: Final = "tsx@4.23.15", "zod@3.25.76"
"""What the runner of Open Responses needs of its repository's packages."""
_FIXTURE: Final = "the runner expects a tool of its own example server; this server has tools about attention"
_RESOURCE: Final = "the runner expects a resource of its own example server; resources are arrays of opened inputs"
_OPTIONAL: Final = "an optional part of the protocol, which the server does not declare"
_TOOLS: Final = "no tools are called: tools are refused by name"
MCP_REFUSALS: Final[Mapping[str, str]] = {
    **dict.fromkeys((
        "tools-call-simple-text", "tools-call-image", "tools-call-audio", "tools-call-embedded-resource",
        "tools-call-mixed-content", "tools-call-with-logging", "tools-call-error", "tools-call-with-progress",
        "tools-call-sampling", "tools-call-elicitation", "elicitation-sep1034-defaults", "elicitation-sep1330-enums",
    ), _FIXTURE),
    "server-sse-multiple-streams": "the server keeps no sessions, so the runner warns and leaves the scenario",
    **dict.fromkeys(("resources-read-text", "resources-read-binary", "resources-templates-read"), _RESOURCE),
    **dict.fromkeys((
        "logging-set-level", "completion-complete", "resources-subscribe", "resources-unsubscribe", "prompts-list",
        "prompts-get-simple", "prompts-get-with-args", "prompts-get-embedded-resource", "prompts-get-with-image",
    ), _OPTIONAL),
}  # fmt: skip
OPEN_RESPONSES_REFUSALS: Final[Mapping[str, str]] = {
    "tool-calling": _TOOLS, "function-call-roundtrip": _TOOLS,
    "file-input": "models read texts and images, and no PDF files",
    "previous-response-id": "no answer is stored, so previous_response_id is refused by name",
}  # fmt: skip


def ask_by_suites() -> bool:
    """Run both suites and print what they find. Returns False for a fault."""
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder) / "models"
        _save_model(models / "reader")
        with process(models, "--mcp", "true", "--log-level", "error") as (_, url):
            return all([_report("MCP", mcp_conformance(url)), _report("Open Responses", open_responses(url, "reader"))])


def mcp_conformance(url: str) -> list[str] | None:
    """The faults that MCP's conformance runner finds; None if it cannot be had."""
    if (folder := _npm("mcp", MCP)) is None:
        return None
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as expected:
        expected.write("server:\n" + "".join(f"  - {name}\n" for name in MCP_REFUSALS))
        expected.flush()
        runner = folder / "node_modules" / "@modelcontextprotocol" / "conformance" / "dist" / "index.js"
        done = _run("node", runner, "server", "--url", f"{url}/mcp", "--expected-failures", expected.name, cwd=folder)
    return [] if done.returncode == 0 else [(done.stdout + done.stderr)[-4000:]]


def open_responses(url: str, model: str, source: Sequence[str] = OPEN_RESPONSES) -> list[str] | None:
    """The faults that the compliance runner of Open Responses finds; None if it cannot be had.

    ``source``: the address of its repository, and the commit.
    """
    folder = _npm("open-responses", *_TYPESCRIPT)
    if folder is None or not _fetch(checkout := folder / "repository", *source):
        return None
    runner = folder / "node_modules" / ".bin" / "tsx", checkout / "bin" / "compliance-test.ts"
    done = _run(*runner, "--base-url", f"{url}/v1", "--api-key", "none", "--model", model, "--json", cwd=checkout)
    try:
        results: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    except (ValueError, KeyError):
        return [(done.stdout + done.stderr)[-4000:]]
    found = {each["id"]: "; ".join(each.get("errors") or []) for each in results if each["status"] == "failed"}
    return [
        *(f"{name}: {errors[:1000]}" for name, errors in found.items() if name not in OPEN_RESPONSES_REFUSALS),
        *(f"{name}: it passes; take it off the list" for name in OPEN_RESPONSES_REFUSALS.keys() - found.keys()),
    ]


def _report(suite: str, faults: list[str] | None) -> bool:
    if faults is None:
        print(f"{suite}: skipped, its runner cannot be had")
        return True
    print(f"{suite}:", "as expected" if not faults else "\n".join(["faults", *faults]))
    return not faults


def _save_model(folder: Path) -> None:
    """Save a small model that reads text with images, most of whose tokens end a text."""
    small_prompts.save(folder, "llava")
    ends = [token for token in range(small_prompts.VOCABULARY) if token % 8]
    GenerationConfig(eos_token_id=ends, pad_token_id=0).save_pretrained(folder)


def _npm(name: str, *packages: str) -> Path | None:
    """A folder with these packages of npm; None if they cannot be had."""
    folder = ENVIRONMENT / name
    written = folder / "installed.json"
    if written.exists() and json.loads(written.read_text()) == [*packages]:
        return folder
    if shutil.which("npm") is None or shutil.which("node") is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    quiet = "--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=0"
    if _run("npm", "install", "--prefix", folder, *quiet, *packages, cwd=folder).returncode:
        return None
    written.write_text(json.dumps(packages))
    return folder


def _fetch(folder: Path, address: str, commit: str) -> bool:
    """Check out a commit of a repository. Returns False if it cannot be had."""
    if shutil.which("git") is None:
        return False
    git = "git", "-C", folder
    if _run(*git, "cat-file", "-e", commit, cwd=folder.parent).returncode == 0:
        return True
    _run("git", "init", "--quiet", folder, cwd=folder.parent)
    fetched = _run(*git, "fetch", "--quiet", "--depth=1", address, commit, cwd=folder.parent)
    return fetched.returncode == 0 and _run(*git, "checkout", "--quiet", commit, cwd=folder.parent).returncode == 0


def _run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=300, check=False)
    except subprocess.TimeoutExpired as late:
        return subprocess.CompletedProcess(command, 124, "", f"it took more than {late.timeout:g} s")
