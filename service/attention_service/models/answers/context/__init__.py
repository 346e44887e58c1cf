"""The sources of an answer: which part of its context made each of its sentences.

It imports ``answers``, ``costs`` and the rooms below. Read ``context_plan.py`` first.
"""
