"""Generator of ``docs/settings.md``: ``python -m tools.docs.settings_page`` writes the page."""

from typing import Any, get_args

from attention_service.settings import Settings
from tools.docs.snippets import ROOT

PAGE = ROOT / "docs" / "settings.md"
COMPUTED = {"models_dir": "the user's data folder, on Linux `~/.local/share/attention-service`"}
"""Defaults that the server computes at its start."""
HEAD = """# Settings

Each setting is an `ATTENTION_*` variable, a flag of `attention serve` (`ATTENTION_MAX_QUEUE` is `--max-queue`), and a
line of `.env` in the working folder. A flag overrides a variable, and a variable overrides `.env`. An empty variable is
ignored. Sizes are in bytes or have a unit (`512MiB`, `8GB`). `make serve` passes variables and `ARGS`, as in
`make serve ARGS="--port 9000"`. For Docker see [deploy.md](deploy.md).

<!-- python -m tools.docs.settings_page writes this page from attention_service/settings.py. -->

| variable | default | meaning |
|---|---|---|
"""
TAIL = """
The client and the `attention` command read two variables: `ATTENTION_URL`, the address of the server, and
`ATTENTION_API_KEY`, a key of the server ([security.md](security.md)). With `ATTENTION_AUTOSTART=false`, the command
starts [no server in the background](cli.md#without-a-server).
"""


def render() -> str:
    """Return the page."""
    rows = [
        f"| `ATTENTION_{name.upper()}` | {_default(name, field)} | {_meaning(field)} |\n"
        for name, field in Settings.model_fields.items()
    ]
    return HEAD + "".join(rows) + TAIL


def _default(name: str, field: Any) -> str:
    if name in COMPUTED:
        return COMPUTED[name]
    if field.default in {None, ""}:
        return ""
    human = getattr(field.default, "human_readable", None)
    return f"`{human() if human else field.default}`"


def _meaning(field: Any) -> str:
    choices = [value for value in get_args(field.annotation) if isinstance(value, str)]
    listed = f" One of {', '.join(f'`{value}`' for value in choices)}." if choices else ""
    return " ".join(field.description.split()) + listed


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
