"""Planning: the kernel and the cost of what was bound.

It imports ``binding``, ``device`` and the cost. Read ``planner.py`` first.
"""
