"""Makers of pages of the documents, or of parts of them."""
