"""All heads of a model in one picture."""
