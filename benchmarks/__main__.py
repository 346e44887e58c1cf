"""Run the quick set, or with ``--full`` everything at length, written to ``benchmarks/results``."""

import argparse
import subprocess
import sys

from benchmarks.processes import ROOT
from benchmarks.tables import RESULTS

PAGES = (
    "kernels",
    "decode_kernels",
    "decode",
    "generation",
    "wire",
    "protocols",
    "planning",
    "admission",
    "beside",
    "client",
    "training",
    "long_inspection",
    "models",
    "effects",
    "package_calls",
    "callers",
    "conversations",
    "adapters",
    "serving",
    "scaling",
    "abuse",
)
"""Modules of this package; each writes the page of its name."""


def main() -> None:
    """Run the pages one after the other, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", metavar="PAGE", choices=[*PAGES, []], help=f"of {', '.join(PAGES)}")
    parser.add_argument("--full", action="store_true", help="at length; writes benchmarks/results")
    options = parser.parse_args()
    for name in options.pages or PAGES:
        output = RESULTS.relative_to(ROOT) / f"{name}.md"
        how = ["--output", str(output)] if options.full else ["--quick"]
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *how], check=True, cwd=ROOT)


if __name__ == "__main__":
    main()
