"""Limits of connections: their number, their work, their speed; and health on a port of its own."""
