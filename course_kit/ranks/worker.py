"""The program of each process of `Ranks`: it runs calls, and a thread watches over it.

The kernel sends requests as files in a folder: `where-7` (report the line that call 7 is at), `cut-7` (cut this rank's
connections), `interrupt-7`. A polled file needs no connection, so a hanging rank cannot block it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import runpy
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import course_lib
from course_kit.exercises.install import sync
from course_kit.ranks import transfers
from course_kit.ranks.connections import cut_connections, prepare_backend, sockets
from course_kit.ranks.outcome import describe, frames_of, pickled_result, stack

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

POLL_S = 0.1


def main() -> None:
    """Run copies of one of ipyparallel's programs until the kernel ends: `KERNEL_PID FOLDER BACKEND COPIES MODULE …`.

    The copies are forked, so all engines share one import of PyTorch, which is most of the start-up time.
    """
    kernel, folder, backend, copies, module = sys.argv[1:6]
    sys.argv = sys.argv[5:]
    (Path(folder) / f"{os.getpid()}.process").touch()
    with ended_with(int(kernel), Path(folder)):
        if module == "ipyparallel.engine":
            get_ready(backend)
    parent = os.getpid()
    if any(os.fork() == 0 for _ in range(int(copies))):
        with ended_with(parent, Path(folder)):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        with ended_with(int(kernel), Path(folder)), contextlib.suppress(ChildProcessError):
            while True:
                process, status = os.wait()
                (Path(folder) / f"{process}.status").write_text(f"{os.waitstatus_to_exitcode(status)}\n")


def get_ready(backend: str) -> None:
    """Prepare the state that all engines share, before they are forked."""
    os.environ["OMP_NUM_THREADS"] = "1"
    if backend != "gloo":
        return  # a GPU driver's state does not survive a fork
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    course_lib.interpret_kernels()  # also on a machine with a GPU
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"  # all peers are on this machine
    if sys.platform != "darwin":  # Apple's frameworks do not survive a fork either
        # A thread that wakes up waits for its turn. Otherwise gloo's thread would preempt the owner of its lock and
        # spin.
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        gc.disable()
        import ipykernel.debugger  # noqa: F401  otherwise each engine imports it as it starts
        import ipyparallel.engine.app  # noqa: F401
        import torch._dynamo  # every optimizer's first step imports it
        import torch.distributed  # noqa: F401

        gc.freeze()  # no collection, in the engines either, traverses the imported objects
        gc.enable()


@contextlib.contextmanager
def ended_with(parent: int, folder: Path) -> Iterator[None]:
    """Run a thread that ends all processes of the folder, with their child processes, once the parent or the folder is
    gone. Each process does it for all of them, since a process that is stuck in compiled code cannot end itself.

    No such thread may run during a fork, which would copy its locks but not the thread that releases them.
    """
    over = threading.Event()
    thread = threading.Thread(target=end_with_parent, args=(parent, folder, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def end_with_parent(parent: int, folder: Path, over: threading.Event) -> None:
    session, others = os.getpgrp(), set[int]()
    while os.getppid() == parent and os.path.isdir(folder):
        with contextlib.suppress(OSError):  # removed in between
            marks = [name for name in os.listdir(folder) if name.endswith(".process")]
            others |= {int(mark.removesuffix(".process")) for mark in marks} - {session}
        if over.wait(0.5):
            return
    for process in others:
        with contextlib.suppress(OSError):
            os.killpg(process, signal.SIGKILL)  # ipyparallel starts each process as the leader of a session
    for _ in range(10):  # a main thread that has just started may still be writing to it
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)
    os.killpg(session, signal.SIGKILL)


class Worker:
    """One rank: its process group, its current call, and the thread that answers for it during a call."""

    def __init__(self, rank: int, world_size: int, backend: str, folder: str):
        self.rank, self.world_size, self.backend, self.folder = rank, world_size, backend, Path(folder)
        self.call: int | None = None  # the number of the running call
        self.interruptible = False  # SIGINT ends the call
        self.group: ProcessGroup | None = None  # the default group that this module has made
        # Never closed: loggers keep the stream that they find in a call.
        self.out = open(  # noqa: SIM115
            self.folder / f"rank-{rank}.out", "a", encoding="utf-8", errors="replace", buffering=1
        )
        self.lock = threading.Lock()  # held while `call` changes and while a call is broken off
        self.in_call = threading.Event()  # an idle rank costs nothing
        self.spared_sockets = set(sockets().values())  # ipyparallel's
        self.main_thread = threading.main_thread().ident or 0
        threading.Thread(target=self.watch, daemon=True).start()

    def join(self, attempt: int) -> None:
        """Join a new default process group on this rank's device, after leaving the present one."""
        import torch
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        if self.backend != "gloo":
            torch.accelerator.set_device_index(self.rank)
        prepare_backend(self.backend)
        store = dist.FileStore(str(self.folder / f"store-{attempt}"), self.world_size)
        os.environ |= {"RANK": str(self.rank), "LOCAL_RANK": str(self.rank), "WORLD_SIZE": str(self.world_size)}
        dist.init_process_group(self.backend, store=store, rank=self.rank, world_size=self.world_size)
        self.group = dist.group.WORLD

    def run(self, call: int, payload: bytes, seed: int, answers: list) -> dict:
        """Call the pickled function; the library runs these answers to exercises. Return {"result": the pickled result}
        or the report of an error.

        Both contain "sequence", how often this rank has used the default group (None if the group has changed),
        "groups", the number of groups that the rank is in, and "unfinished", the transfers that it has not waited for.
        """
        import torch.distributed as dist

        signal.signal(signal.SIGINT, self.interrupt)
        with contextlib.redirect_stdout(self.out), contextlib.redirect_stderr(self.out):
            try:
                outcome = self.attempt(call, payload, seed, answers)
            except KeyboardInterrupt as error:  # it came while another error was being described
                outcome = describe(error)
            finally:
                self.interruptible = False
                self.in_call.clear()
                with self.lock:
                    self.call = None
                self.out.flush()
        same_group = dist.is_initialized() and dist.group.WORLD is self.group
        group: Any = self.group  # its stub lacks the method
        return outcome | {
            "sequence": group._get_sequence_number_for_group() if same_group else None,
            "groups": len(dist.distributed_c10d._world.pg_map),
            "unfinished": transfers.unfinished(),
        }

    def attempt(self, call: int, payload: bytes, seed: int, answers: list) -> dict:
        """Return the outcome of a call, unless an interrupt comes at a bad moment."""
        import cloudpickle
        import torch

        try:
            self.call, self.interruptible = call, True
            self.in_call.set()
            torch.set_num_threads(1)
            if self.backend != "gloo":
                torch.accelerator.set_device_index(self.rank)
            sync(answers)
            transfers.forget()
            set_seeds(seed)
            function, args, kwargs = cloudpickle.loads(payload)
            return {"result": pickled_result(function(*args, **kwargs))}
        except BaseException as error:
            return describe(error)

    def interrupt(self, *_) -> None:
        """Handle SIGINT: raise in the running function, once."""
        if self.interruptible:
            self.interruptible = False
            raise KeyboardInterrupt

    def watch(self) -> None:
        """Answer for the rank during a call: report its stack, or break the call off."""
        answered: set[str] = set()

        def asked(what: str) -> bool:
            """Return True if the kernel sends this request to the running call for the first time."""
            name = f"{what}-{self.call}"
            exists = os.path.exists(self.folder / name)  # False, not an error, if the rank may not read the folder
            new = self.call is not None and name not in answered and exists
            answered.update([name] if new else [])
            return new

        while True:
            self.in_call.wait()
            time.sleep(POLL_S)
            with self.lock:  # the call cannot end, and the next one cannot begin, during this
                if asked("where"):
                    self.answer(f"where-{self.call}", [stack(frames_of(self.main_thread)), transfers.unfinished()])
                if asked("cut"):
                    self.cut()
                if asked("interrupt"):
                    signal.pthread_kill(self.main_thread, signal.SIGINT)

    def answer(self, name: str, content: list) -> None:
        """Leave an answer for the kernel, atomically."""
        part = self.folder / f"{name}-rank-{self.rank}.part"
        part.write_text(json.dumps(content))
        part.replace(part.with_suffix(""))

    def cut(self) -> None:
        """Wake up the main thread if it waits for other ranks."""
        import torch.distributed as dist

        with contextlib.suppress(Exception):
            if self.backend != "gloo":
                dist.distributed_c10d._get_default_group().abort()
        cut_connections(self.spared_sockets)


def set_seeds(seed: int) -> None:
    """Seed Python, NumPy and PyTorch with the same number on every rank."""
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def leave_other_groups() -> None:
    """Destroy the groups that a call has made, so that the next call starts with only the default group.

    Each group has threads and connections. A DeviceMesh is a reference cycle, hence the garbage collection.
    """
    import torch.distributed as dist

    others = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    while others:
        with contextlib.suppress(Exception):
            dist.destroy_process_group(others.pop())
    gc.collect()


_worker: list[Worker] = []  # the worker of this process; ipyparallel's calls come one at a time and find it here


def start(*args) -> int:
    """Make the worker of this process. Returns the process id."""
    _worker[:] = [Worker(*args)]
    transfers.watch()
    gc.freeze()  # a collection then traverses objects of calls, not PyTorch's million objects
    return os.getpid()


def join(attempt: int) -> None:
    _worker[0].join(attempt)


def run(call: int, payload: bytes, seed: int, answers: list) -> dict:
    return _worker[0].run(call, payload, seed, answers)
