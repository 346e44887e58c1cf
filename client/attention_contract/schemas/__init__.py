"""Requests and replies of every operation, one file for each group of paths."""
