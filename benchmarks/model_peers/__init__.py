"""Other servers of whole models."""
