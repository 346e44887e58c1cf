"""One pass over a model: its attentions, what is asked of each, and the states between its layers."""
