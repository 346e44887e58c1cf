"""Sweeps of edits: each edit by itself, measured in passes of many copies of the texts."""
