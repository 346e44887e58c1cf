"""The tools, one file each: its arguments, its answer, and the questions that it asks.

It imports ``agents`` alone. Read ``look_at_head.py`` first.
"""
