"""A walk over the model types of transformers: each is built small, and held against its eager self."""
