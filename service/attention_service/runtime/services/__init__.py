"""The services of the engine: modules, recordings, analysis, kept passes, fetched checkpoints, the store of others."""
