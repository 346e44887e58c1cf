"""Running texts that share passes: their keys and values in one slab, their prompts, and the trial at the load."""
