"""The process of a further device of a spread model: it takes each step that the first process takes."""

import os
from typing import Any

from torch._C._distributed_c10d import TCPStore

from attention_service.models.passes.device_heads import DeviceHeads
from attention_service.models.process.devices.device_group import HOST, join_group
from attention_service.models.process.devices.orders import Orders
from attention_service.models.process.process_pipes import ProcessPipes
from attention_service.models.process.served_model import ServedModel
from attention_service.runtime.device.freed_memory import keep_freed_memory


def follow() -> None:
    """Load a part of the model that the first process names, and carry out its orders until it ends."""
    keep_freed_memory()
    pipes = ProcessPipes.take_over()
    facts = pipes.next().facts
    orders = Orders(_loaded(facts))
    pipes.send("loaded")
    while True:
        order = pipes.next()
        try:
            orders.perform(order)
        except Exception as fault:
            pipes.send("fault", {"order": order.facts["order"], "reason": f"{type(fault).__name__}: {fault}"[:500]})


def _loaded(facts: dict[str, Any]) -> ServedModel:
    rank, devices = facts["rank"], len(facts["devices"])
    store = TCPStore(HOST, facts["port"], devices, is_master=False)
    join_group(facts["device"], rank, devices, store, facts["seed"])
    try:
        return ServedModel.load(facts, lambda _: None, DeviceHeads(rank, devices))
    except Exception as fault:  # the first process has the same, and tells the server
        os.write(2, f"device {rank}: {type(fault).__name__}: {fault}\n".encode())
        raise SystemExit(1) from None
