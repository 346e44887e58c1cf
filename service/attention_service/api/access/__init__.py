"""Access to the server: who may ask, from which pages, for which operations."""
