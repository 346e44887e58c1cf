"""Bodies of requests and replies: read within limits, negotiated, drawn."""
