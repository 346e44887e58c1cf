"""Limits of connections: their number, their work, their speed; and health on a port of its own.

It imports the runtime's entrance, and nothing of FastAPI. Read ``guarded_http.py`` first.
"""
