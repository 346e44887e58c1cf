"""Threads of a computation on the CPU: as many as the machine gives, and how they wait for each other.

PyTorch divides each operation among threads of OpenMP, and each waits until the last has done its part. A thread that
sleeps meanwhile is woken for the next operation, which takes as long as a small one: two threads then do no more than
one. A thread that spins is there at once, and takes many times the time of the work if another program has the core
of the one it waits for. The server's threads sleep. Those of a model's process spin for about a millisecond before
they sleep, and sleep at once while other programs use the cores (``shared_cores``, which only GNU's OpenMP obeys).
This module imports no PyTorch, which reads the variables when it is imported.
"""

import math
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Final

SLEEPING: Final = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
"""The variables of GNU's OpenMP, which PyTorch's wheels for Linux hold, and of LLVM's and Intel's."""
SPINNING: Final = {"GOMP_SPINCOUNT": "30000", "KMP_BLOCKTIME": "0"}
"""The same of threads that spin first: a number of turns. Those of LLVM and Intel would spin beside other programs."""
_VARIABLES: Final = SLEEPING.keys() | SPINNING.keys()
_CHOSEN: Final = "_ATTENTION_THREADS_SLEEP"
"""Set beside ``SLEEPING`` if the server chose it, so that models need not."""
_CGROUPS: Final = Path("/sys/fs/cgroup")
_OWN_CGROUP: Final = Path("/proc/self/cgroup")


def sleep_while_waiting(environment: MutableMapping[str, str]) -> None:
    """Let threads sleep while they wait, in a process that imports PyTorch in this environment later.

    An environment that already says how they wait is left as it is.
    """
    if not environment.keys() & _VARIABLES:
        environment.update(SLEEPING | {_CHOSEN: "1"})


def waiting_of_models(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables by which threads of a model's process wait: a user's if the server's environment has any."""
    if _CHOSEN in environment or not environment.keys() & _VARIABLES:
        return dict(SPINNING)
    return {name: environment[name] for name in _VARIABLES if name in environment}


def usable_cores(own: Path = _OWN_CGROUP, root: Path = _CGROUPS) -> int:
    """Return the cores that this process may compute on: those of its affinity, within the quota of its control group.

    ``own``, ``root``: the file that names the group, and the folder of all groups.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(math.ceil(quota) for quota in _quotas(own, root))]))


def _quotas(own: Path, root: Path) -> list[float]:
    """The quotas of the group and of those around it, in cores."""
    quotas: list[float] = []
    for line in _text(own).splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / controllers if controllers else root
        folder = base / name.strip("/")
        # In a container the name may be that of the host, which is not mounted here.
        for group in (folder, *folder.parents) if folder.is_dir() else (base,):
            if controllers:
                limits = [_text(group / f"cpu.cfs_{kind}_us") for kind in ("quota", "period")]
            else:
                limits = _text(group / "cpu.max").split()
            if len(limits) == 2 and all(limit.strip().isdecimal() for limit in limits):
                quotas.append(int(limits[0]) / int(limits[1]))
            if group == base:
                break
    return quotas


def _text(file: Path) -> str:
    try:
        return file.read_text("ascii")
    except (OSError, ValueError):
        return ""
