"""Programs for the development of the service: makers of pages, walks, fuzzing, long checks. ``tests`` tests them."""
