"""Checkpoints in the model repository: their files, the layouts of their families, and the import of one layer."""
