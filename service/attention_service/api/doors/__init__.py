"""Doors for the clients of other protocols. Each translates: the native operations answer.

A door imports ``api/handlers.py`` of the rest of the API, and no other door. Read ``openai/openai_handlers.py``
first.
"""
