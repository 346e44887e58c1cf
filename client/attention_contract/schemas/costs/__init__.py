"""Costs: of an attention and of a whole model, over sizes and devices, and the accuracy of their predictions."""
