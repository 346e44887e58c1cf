"""The mathematics of attention: torch in, torch out. Knows nothing of HTTP, resident modules or devices' state."""
