"""A typed client of the attention service."""
