"""Bodies of requests and replies: read within limits, negotiated, drawn.

It imports the contract, ``http_limits`` and the runtime. Read ``request_body.py`` first.
"""
