"""The imports of a process that has loaded a model. Its copies load theirs in half of the time."""

import gc

import torch

import attention_service.models.process.__main__  # noqa: F401
from attention_service.models.process.served_model import warm

threads = torch.get_num_threads()
torch.set_num_threads(1)  # threads that had computed would be missing in the copies, which would wait for them
warm()
torch.set_num_threads(threads)
gc.collect()
gc.freeze()
