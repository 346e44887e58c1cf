"""Path patching: a change of what one component of a model sends, seen by one other alone.

It imports ``answers``, ``costs`` and the rooms below. Read ``path_effects.py`` first.
"""
