"""Jobs of a run by benchmarks/gpu.py that go wrong in each way there is, among some that don't. Nothing here needs a
GPU: what crashes writes to an address that is not its own.
"""

import ctypes
import functools
import os
import subprocess
import sys
import time
from pathlib import Path

from gpu import Job, Skipped


def fine():
    yield {"pid": os.getpid()}


def crash():
    yield {"before": 1}
    ctypes.memset(1, 0, 1)


def hang():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield {"child": child.pid}
    time.sleep(600)


def wrong():
    """A softmax that is off by some percent, in the harness of all comparisons."""
    import dataclasses

    import kernels
    import torch
    from kernel_runs import working

    case = next(kernels.KERNELS.cases(torch.device("cpu"), "cpu"))
    off = dataclasses.replace(case, methods=case.methods | {"ours": lambda x: torch.softmax(1.1 * x, -1)})
    yield {"errors": working(off, torch.device("cpu"), kernels.KERNELS)[1]}


def missing():
    raise Skipped("no such tool")
    yield


def slow():
    time.sleep(600)
    yield


def meet(number: int):
    """Passes when all three are under way."""
    folder = Path(os.environ["MEETING"])
    (folder / f"{number}").touch()
    while len([*folder.iterdir()]) < 3:
        time.sleep(0.01)
    yield {"pid": os.getpid()}


def jobs(device: str):
    assert device == "cpu"
    yield Job("first", fine, 0)
    yield Job("crash", crash, 0)
    yield Job("after the crash", fine, 0)
    yield Job("hang", hang, 0, limit_s=1)
    yield Job("after the hang", fine, 0)
    yield Job("wrong", wrong, 0)
    yield Job("after the wrong one", fine, 0)
    yield Job("missing", missing, 0)
    yield Job("after the missing one", fine, 0)
    yield Job("alone", fine, 0, alone=True)
    yield Job("last", fine, 0)
    for number in range(3):
        yield Job(f"beside {number}", functools.partial(meet, number), 0, limit_s=60, beside=True)
    yield Job("a crash beside", crash, 0, beside=True)
    yield Job("long", slow, 1000)


def record(known: dict):
    yield f"{len(known)} jobs"
