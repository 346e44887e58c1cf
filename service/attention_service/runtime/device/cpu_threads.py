"""Threads of a computation on the CPU: as many as the machine gives, asleep while they wait for each other.

PyTorch divides each operation among threads of OpenMP, which by default spin until the last has done its part. Beside
other programs, that one may not run meanwhile, and spinning takes many times the time of the work. This module imports
no PyTorch, which reads the variables when it is imported.
"""

import math
import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import Final

WAITING: Final = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
"""The variables of GNU's OpenMP, which PyTorch's wheels for Linux hold, and of LLVM's and Intel's."""
_ALSO: Final = "GOMP_SPINCOUNT"
_CGROUPS: Final = Path("/sys/fs/cgroup")
_OWN_CGROUP: Final = Path("/proc/self/cgroup")


def sleep_while_waiting(environment: MutableMapping[str, str]) -> None:
    """Let threads sleep while they wait, in a process that imports PyTorch in this environment later.

    An environment that already says how they wait is left as it is.
    """
    if not environment.keys() & {*WAITING, _ALSO}:
        environment.update(WAITING)


def usable_cores(own: Path = _OWN_CGROUP, root: Path = _CGROUPS) -> int:
    """Return the cores that this process may compute on: those of its affinity, within the quota of its control group.

    ``own``, ``root``: the file that names the group, and the folder of all groups.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(math.ceil(quota) for quota in _quotas(own, root))]))


def _quotas(own: Path, root: Path) -> list[float]:
    """The quotas of the group and of those around it, in cores."""
    found: list[float] = []
    for line in _text(own).splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / controllers if controllers else root
        folder = base / name.strip("/")
        # In a container the name may be that of the host, which is not mounted here.
        for group in (folder, *folder.parents) if folder.is_dir() else (base,):
            if controllers:
                limits = [_text(group / f"cpu.cfs_{each}_us") for each in ("quota", "period")]
            else:
                limits = _text(group / "cpu.max").split()
            if len(limits) == 2 and all(each.strip().isdecimal() for each in limits):
                found.append(int(limits[0]) / int(limits[1]))
            if group == base:
                break
    return found


def _text(file: Path) -> str:
    try:
        return file.read_text("ascii")
    except (OSError, ValueError):
        return ""
