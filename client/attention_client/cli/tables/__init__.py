"""Replies for people: as tables and maps on a terminal, or in a file."""
