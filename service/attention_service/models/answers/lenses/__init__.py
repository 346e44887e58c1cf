"""Lenses: what states inside a model would predict if they were read out at once."""
