"""WebSocket connections: steps of sessions, and sounds piece by piece.

They import the settings of a client, and nothing of its calls but what a message is made of. Read ``web_sockets``
first.
"""
