"""Analyses of weights, features and parameters: computations that read what they need part by part."""
