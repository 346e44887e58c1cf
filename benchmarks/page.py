"""Options that all benchmarks share: how long to measure, and the page to write."""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.tables import PACKAGES, provenance

IN_TURN = (
    "Each row times a case and its baseline in turn. The ratio is the median of the ratios round by round, with the\n"
    "tenth and ninetieth percentile beside it. The milliseconds belong to the machine; the ratio says more."
)


def parser(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """Options that all have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="few rounds of what does not take long")
    made.add_argument(
        "--rounds", type=int, help=f"rounds of each pair (default: {rounds}; {fewer(rounds)} with --quick)"
    )
    made.add_argument("--output", type=Path, help="the page to write, beside printing it")
    return made


def fewer(rounds: int) -> int:
    """Return the number of rounds of a quick run."""
    return max(3, rounds // 4)


def publish(
    title: str, text: str, lines: Iterable[str], output: Path | None, packages: Sequence[str] = PACKAGES
) -> None:
    """Print the lines as they come, then write the page, if wanted."""
    page = [f"# {title}", "", text.rstrip(), "", provenance(packages), ""]
    print(*page, sep="\n")
    for line in lines:
        print(line, flush=True)
        page.append(line)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text("\n".join([*page, ""]), "utf-8")
