"""Benchmarks: what is measured side by side in one run, and how.

``python -m benchmarks`` (or ``make bench``) prints a table and writes it to ``docs/benchmarks.md``. Each row compares a
case with its baseline in interleaved rounds, so that a drift of the machine meets both alike: read the ratio and its
spread, not the milliseconds.
"""
