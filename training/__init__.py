"""The training of the small model that ships with the service."""
