"""Decode sessions: pasts that stay on the server, in pages that they share.

It imports ``operations`` and the rooms below it. Read ``live_sessions.py`` first.
"""
