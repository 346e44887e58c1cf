"""Writer of the documents' Python blocks as modules, for a type checker: ``python -m tools.docs.typed_snippets``.

Blocks of a document share their names, as they do when they run. A line of a module is the same line of its document,
so that what a type checker reports can be found there.
"""

import shutil

from tools.docs.snippets import DOCUMENTS, ROOT, blocks

FOLDER = ROOT / "build" / "snippets"


def main() -> None:
    """Write one module for each document that has Python."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    for document in DOCUMENTS:
        found = [block for block in blocks(document) if block.language == "python"]
        lines: list[str] = []
        for block in found:
            lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
        if found:
            (FOLDER / f"of_{document.stem.replace('-', '_').lower()}.py").write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
