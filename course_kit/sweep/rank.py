"""The program of each rank of a sweep's run: join the group, train, and write the results to a folder.

    python -m torch.distributed.run … -m course_kit.sweep.rank FOLDER [options of the training program]

FOLDER gets steps.jsonl and device.txt from rank 0, and error-N.json from rank N if it fails. The program only needs
torch and course_lib. On SIGTERM, which ends a run that has passed its time limit, each rank prints its current line.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import platform
import re
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from course_kit.ranks.connections import prepare_backend
from course_kit.ranks.outcome import LOST_PEER

BACKENDS = {"cuda": "nccl", "xpu": "xccl"}
GRACE_S = 5.0  # wait of a rank that only lost its peer, so that the peer's own end is seen first
NO_MEMORY = re.compile(r"out of memory|can't allocate memory|cannot allocate memory", re.IGNORECASE)


def join_group() -> str:
    """Initialize the default group on this rank's device, with one CPU thread per rank; return the device's name."""
    import torch
    import torch.distributed as dist

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type not in BACKENDS:
        torch.set_num_threads(1)  # a rank is a core, in every layout
        prepare_backend("gloo")
        dist.init_process_group("gloo")
        return f"{platform.machine()} CPU, {os.cpu_count()} cores"
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.accelerator.set_device_index(local_rank)
    device = torch.device(accelerator.type, local_rank)
    prepare_backend(BACKENDS[accelerator.type])
    dist.init_process_group(BACKENDS[accelerator.type], device_id=device)
    return torch.cuda.get_device_name() if accelerator.type == "cuda" else accelerator.type


def train(folder: Path, options: list[str]) -> None:
    """Train with the options of the training program, in a group of all ranks."""
    import torch.distributed as dist

    from course_lib.train import program

    device = join_group()
    if dist.get_rank() == 0:
        (folder / "device.txt").write_text(device, encoding="utf-8")
    program.main([*options, "--out", str(folder / "steps.jsonl")])
    dist.destroy_process_group()


def headline(error: BaseException) -> str:
    """Return an error in one line, without torch's C++ stack."""
    text = " ".join(str(error).split("\nException raised from ")[0].split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def report(error: BaseException) -> dict[str, Any]:
    """Return the report of a failed rank."""
    return {
        "time_ns": time.time_ns(),
        "rank": int(os.environ["RANK"]),
        "headline": headline(error),
        "lost_peer": isinstance(error, RuntimeError) and bool(LOST_PEER.search(str(error))),
        "no_memory": isinstance(error, MemoryError) or bool(NO_MEMORY.search(str(error))),
    }


def main(argv: list[str]) -> None:
    """Run a rank, and end the process. argv: the folder, and the options of the training program."""
    faulthandler.register(signal.SIGTERM, all_threads=False, chain=True)
    folder, status = Path(argv[0]), 0
    try:
        train(folder, argv[1:])
    except BaseException as error:
        traceback.print_exception(error)
        failure, status = report(error), 1
        partial = folder / f"error-{failure['rank']}.part"
        partial.write_text(json.dumps(failure), encoding="utf-8")
        partial.replace(partial.with_suffix(".json"))  # complete or not at all: torchrun may end this rank
        time.sleep(GRACE_S if failure["lost_peer"] else 0)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)  # a gloo rank may abort while the interpreter shuts down


if __name__ == "__main__":
    main(sys.argv[1:])
