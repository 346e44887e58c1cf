"""The tools, one file each: its arguments, its answer, and the questions that it asks."""
