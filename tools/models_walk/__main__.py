"""Walk over every model type, and write docs/models-table.md.

python -m tools.models_walk [--jobs 2] [--resume] [--device cpu] [--output docs/models-table.md] [KIND …]

What is found of each type is kept in build/models_walk.jsonl. ``--resume`` goes on with a walk that was interrupted, if
the code is the same as when it began, so that the table is that of one walk.
"""

import argparse
import warnings
from pathlib import Path

from tools.docs.snippets import ROOT
from tools.models_walk.kept_walk import KeptWalk, walk
from tools.models_walk.model_types import kinds, prepare
from tools.models_walk.table_page import page, summary


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="go on with the walk that was interrupted")
    parser.add_argument("--device", default="cpu", help="of both models; the page in docs is of the cpu")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "models-table.md")
    options = parser.parse_args()
    prepare()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        walked = options.kinds or kinds()
        kept = KeptWalk(ROOT / "build" / "models_walk.jsonl", options.device, resumes=options.resume)
        found = walk(walked, kept, options.jobs)
    options.output.write_text(page(found), "utf-8")
    print(summary(found))


if __name__ == "__main__":
    main()
