"""The imports of a process that has loaded a model. Its copies load theirs in half of the time."""

import gc

import attention_service.models.process.__main__  # noqa: F401
from attention_service.models.process.served_model import warm

warm()
gc.collect()
gc.freeze()
