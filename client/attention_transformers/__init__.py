"""Attention of ``transformers`` models in the service's terms, for the client and for the server's models."""
