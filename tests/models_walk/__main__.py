"""Walk over every model type, and write docs/models-table.md.

python -m tests.models_walk [--jobs 2] [--device cpu] [--output docs/models-table.md] [KIND …]
"""

import argparse
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from tests.docs.snippets import ROOT
from tests.models_walk.compared import kinds, limited, prepare
from tests.models_walk.table_page import page


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="of both models; the page in docs is of the cpu")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "models-table.md")
    asked = parser.parse_args()
    prepare()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        walked = asked.kinds or kinds()
        with ProcessPoolExecutor(asked.jobs, get_context("spawn"), prepare) as pool:
            found = []
            for each in pool.map(partial(limited, device=asked.device), walked):
                found.append(each)
                print(f"{len(found)}/{len(walked)} {each}", flush=True)
    asked.output.write_text(page(found), "utf-8")


if __name__ == "__main__":
    main()
