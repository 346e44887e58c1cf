"""Decode sessions: pasts that stay on the server, in pages that they share."""
