"""Path patching: a change of what one component of a model sends, seen by one other alone."""
