"""Doors for the clients of other protocols. Each translates: the native operations answer."""
