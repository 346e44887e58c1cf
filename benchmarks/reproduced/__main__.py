"""List the results, or reproduce one: install its package, start a server, and print both numbers."""

import argparse
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from attention_client import local
from benchmarks.reproduced.package import Line
from benchmarks.tables import table

NAMES = ("antiberty", "iglm", "rxnmapper", "smollm2")
"""Modules of this package, each with ``PACKAGE``, ``write``, which writes checkpoints, and ``lines``."""


def shown(lines: list[Line]) -> str:
    """The table of a result."""
    rows = [
        [line.name, f"{line.theirs:.9g}", f"{line.ours:.9g}", f"{line.difference:.1e}", f"{line.bound:g}"]
        for line in lines
    ]
    return table(["number", "package", "this server", "difference", "bound"], rows)


def main() -> None:
    """Exit with 1 if a number differs from the package's by more than its bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", choices=NAMES)
    name = parser.parse_args().name
    if name is None:
        for each in NAMES:
            print(f"{each:<11}{(import_module(f'benchmarks.reproduced.{each}').__doc__ or '').splitlines()[0]}")
        return
    result = import_module(f"benchmarks.reproduced.{name}")
    result.PACKAGE.install()
    with TemporaryDirectory() as folder:
        result.write(Path(folder))
        with local(models_dir=folder) as client:
            lines = list(result.lines(client))
    print(shown(lines))
    raise SystemExit(0 if all(line.holds for line in lines) else 1)


if __name__ == "__main__":
    main()
