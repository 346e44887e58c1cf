"""Generation: its settings, the tokens one by one, their attention, and the objects of OpenAI's API.

It imports ``answers`` and the rooms below it; here, ``objects`` and ``plans`` import ``decoding``. Read
``generation.py`` first.
"""
