"""Every code block of the documents runs and gives the output shown."""

import pytest
from tools.docs.snippets import DOCUMENTS, SERVER_SETTINGS, Block, Session, SnippetError, blocks, check

from tests.conftest import live_server

RUNNABLE = [document for document in DOCUMENTS if any(block.language in {"python", "sh"} for block in blocks(document))]
BUDGETED = [document for document in RUNNABLE if "memory_budget" in document.read_text("utf-8")]
"""Pages whose examples read or show the server's memory budget."""
BRIEF = {"README", "checkpoints", "first-steps", "look", "monitoring", "open", "transformers"}
"""Pages whose examples take a second or so. The others start many commands, or the processes of models."""


@pytest.mark.parametrize(
    ("document", "budget"),
    [
        pytest.param(each, budget, marks=[pytest.mark.slow] * (each.stem not in BRIEF), id=f"{each.stem}{name}")
        for pages, budget, name in ((RUNNABLE, None, ""), (BUDGETED, 2**30, " with 1 GiB"))
        for each in pages
    ],
)
def test_every_example_gives_the_output_shown(document, budget, tmp_path):
    """``budget``: the memory budget of the server; None for the default, a share of the machine's memory."""
    models, folder = tmp_path / "models", tmp_path / "folder"
    folder.mkdir()
    models.mkdir()
    wrong = []
    with live_server(models, memory_budget=budget, **SERVER_SETTINGS) as url:
        session = Session(url, models, folder)
        for block in blocks(document):
            if block.language in {"python", "sh"}:
                try:
                    check(block, session.run(block))
                except SnippetError as fault:
                    wrong.append(str(fault))
        session.close()
    assert not wrong, "\n\n".join(wrong)


def shown(output, language, document=DOCUMENTS[0]):
    return Block(document, "sh", "", 1, output, language)


@pytest.mark.parametrize(
    ("language", "output", "printed"),
    [
        ("json", '{"a": 1.0, "ran": {"compute_ms": 3}}', '{"a": 1.0000001, "ran": {"compute_ms": 5}}'),
        ("json", '{"a": [1, "…", 4], "…": "…"}', '{"a": [1, 2, 3, 4], "b": 1}'),
        ("json", '{"id": "…"}', '{"id": [1]}'),
        ("text", "shape  (2, 3) mean 0.1235", "shape (2, 3)   mean 0.1234\n"),
        ("text", "version 1e7… of demo\n…\nend", "version 1e7ab of demo\na\nb\nend\n"),
    ],
)
def test_differences_between_machines_are_accepted(language, output, printed):
    check(shown(output, language), printed)


@pytest.mark.parametrize(
    ("language", "output", "printed"),
    [
        ("json", '{"a": 1.0}', '{"a": 1.001}'),
        ("json", '{"a": 1000000}', '{"a": 1000001}'),
        ("json", '{"a": 1}', '{"a": 1, "b": 2}'),
        ("json", '{"a": 1, "b": 2}', '{"a": 1}'),
        ("json", '{"a": [1, "…", 4]}', '{"a": [1, 2, 3]}'),
        ("json", '{"a": true}', '{"a": 1}'),
        ("json", "{}", "not json"),
        ("text", "mean 0.1235", "mean 0.1239"),
        ("text", "shape (2, 3)", "shape (2, 4)"),
        ("text", "one", "one\ntwo"),
        ("text", "one\n…\nlast", "one\ntwo"),
    ],
)
def test_wrong_outputs_are_detected(language, output, printed):
    with pytest.raises(SnippetError):
        check(shown(output, language), printed)
