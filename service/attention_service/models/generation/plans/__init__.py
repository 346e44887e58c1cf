"""Plans of generations: a request checked, with its settings, its layers and the memory that it takes.

It imports ``decoding``, and the rooms below ``generation``. Read ``generation_plan.py`` first.
"""
