"""Long checks of a running server: its OpenAPI document, a soak, and faults that are brought about."""
