"""Ranks inside a notebook: `Ranks(4)` starts four processes, `ranks(function, *args)` runs a function on each of them.

The default process group is ready: on NCCL if there is a GPU for each rank, otherwise on gloo. A failing rank, a
deadlock and the interrupt button end in a report by rank, cell and line, and the next call works again. The code that
runs on the ranks is in `worker`.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

from course_kit.exercises.install import installed
from course_kit.ranks import worker
from course_kit.ranks.processes import Processes
from course_kit.ranks.report import (
    BadCall,
    Interrupted,
    RankError,
    RanksHung,
    describe_line,
    failed,
    location_of,
    pickled_call,
    where,
)

GRACE_S = 0.5  # for the other ranks after the first error: they may be about to end or to fail as well
CUT_S = 0.4  # for ranks that wait for others, after their connections are cut
STOP_S = 3.0  # for all ranks, after they are interrupted
LOOK_S = 0.1  # the longest wait for a rank that has not ended
ALIVE_S = 0.5  # between two checks that the processes are alive
SHOW_S = 0.5  # between two reads of the ranks' output; a shorter call prints it by rank at its end


class Call:
    """One running call on all ranks."""

    def __init__(self, processes: Processes, number: int):
        self.processes, self.number = processes, number
        self.pending: dict[int, Any] = {}  # ipyparallel's AsyncResult, by rank
        self.outcomes: dict[int, dict] = {}  # the results of `worker.run`, of the ranks that have ended
        self.stopped_at: dict[int, list] = {}  # the stacks of the ranks that did not end by themselves
        self.unfinished: dict[int, list] = {}  # the transfers that these ranks had not waited for
        self.died = False
        self.next_look_alive = 0.0

    def start(self, payload: bytes, seed: int) -> None:
        """Have all ranks run the pickled call, with the answers that are installed in this kernel's library."""
        self.pending = dict(enumerate(self.processes.apply(worker.run, self.number, payload, seed, installed())))

    @property
    def failures(self) -> dict[int, dict]:
        """The reports of the failed ranks, the cause first: the earliest error that is not a lost connection."""
        reports = [item for item in self.outcomes.items() if "error" in item[1]]
        return dict(sorted(reports, key=lambda item: (item[1]["lost_peer"], item[1]["time_ns"])))

    @property
    def ended_well(self) -> bool:
        return not self.pending and not self.failures

    @property
    def group_is_clean(self) -> bool:
        """True if all ranks are still in their first group and have used it equally often.

        Otherwise a collective that only some of the ranks have started would meet a collective of the next call.
        """
        sequences = {outcome["sequence"] for outcome in self.outcomes.values()}
        return len(sequences) == 1 and None not in sequences

    @property
    def made_groups(self) -> bool:
        """True if a rank is in groups other than the default one. The ranks leave them when all ranks have ended: a
        peer that is still in its last collective would otherwise meet a closed connection.
        """
        return any(outcome["groups"] > 1 for outcome in self.outcomes.values())

    def results(self) -> list:
        """Return the ranks' results. Raises RankError if a result cannot be unpickled here."""
        values = []
        for rank, outcome in sorted(self.outcomes.items()):
            try:
                values.append(pickle.loads(outcome["result"]))
            except Exception as error:
                raise RankError(f"rank {rank}: its result can't be read in this kernel: {error}") from None
        return values

    def wait(self, timeout_s: float) -> None:
        """Wait until all ranks have ended, or until `timeout_s` or the grace period after the first failure is over."""
        deadline, next_look = time.monotonic() + timeout_s, time.monotonic() + SHOW_S
        while self.pending and time.monotonic() < deadline:
            failed_before = bool(self.failures)
            self.outcomes |= self.collect()
            if self.failures and not failed_before:
                deadline = min(deadline, time.monotonic() + GRACE_S)
            if time.monotonic() > next_look:
                self.processes.show_output()
                next_look = time.monotonic() + SHOW_S
        self.processes.show_output(rest=not self.pending)

    def collect(self) -> dict[int, dict]:
        """Return the outcomes of the ranks that have ended since the last call, after a short wait."""
        next(iter(self.pending.values())).wait(LOOK_S)
        outcomes, look_alive = {}, time.monotonic() > self.next_look_alive
        if look_alive:
            self.next_look_alive = time.monotonic() + ALIVE_S
        for rank in list(self.pending):
            ready = self.pending[rank].ready()  # asked once: the answer may change at any time
            if ready and self.pending[rank].successful():
                outcomes[rank] = self.pending.pop(rank).get()
            elif ready or look_alive and not self.processes.alive(rank):
                died = f"its process died without a Python error: {self.processes.death(rank)}"
                outcomes[rank] = {"error": died, "lost_peer": False, "stack": [], "time_ns": time.time_ns()}
                self.died = True
                del self.pending[rank]
        return outcomes

    def break_off(self) -> None:
        """Ask the running ranks for their stacks, then stop them. Results that arrive after that are dropped."""
        for rank, (stack, unfinished) in self.processes.where(self.number, list(self.pending)).items():
            self.stopped_at[rank], self.unfinished[rank] = stack, unfinished
        for what, patience_s in (("cut", CUT_S), ("interrupt", STOP_S)):
            self.processes.ask(f"{what}-{self.number}")
            deadline = time.monotonic() + patience_s
            while self.pending and time.monotonic() < deadline:
                self.collect()
        self.processes.show_output(rest=True)

    def locations(self) -> str:
        """Return the locations of the ranks, one line per location."""
        ranks_at: dict[str, list[str]] = {}
        for rank in sorted({*self.outcomes, *self.stopped_at}):
            report = self.outcomes.get(rank, {})
            if rank in self.stopped_at:
                text = where(self.stopped_at[rank])
            elif "error" in report:
                text = "lost its connection" if report["lost_peer"] else report["error"]
                text += location_of(report, "; ")
            else:
                text = "ended"
            ranks_at.setdefault(text, []).append(str(rank))
        return "\n".join(f"  {named(ranks)}: {text}" for text, ranks in ranks_at.items())

    def never_waited_for(self) -> str:
        """Return the transfers that ranks have started and not waited for, one line per transfer, or ""."""
        ended = {rank: report.get("unfinished", []) for rank, report in self.outcomes.items()}
        ranks_of: dict[str, list[str]] = {}
        for rank, transfers in sorted((ended | self.unfinished).items()):
            for function, file, line, count in transfers:
                text = f"{count} x {function}" if count > 1 else function
                text += f", started in {describe_line(file, line)}" if file else ""
                ranks_of.setdefault(text, []).append(str(rank))
        lines = [f"\n  {named(ranks)}: {text}" for text, ranks in ranks_of.items()]
        return "\nStarted, and not waited for until then:" + "".join(lines) if lines else ""

    def error(self, timeout_s: float) -> RankError:
        """Return the error to raise."""
        if not self.failures:
            message = f"not all ranks had ended after {timeout_s:g} s (timeout_s). They were at\n{self.locations()}"
            return RanksHung(message + self.never_waited_for())
        rank, report = next(iter(self.failures.items()))
        self.outcomes.pop(rank)
        at = location_of(report, "\n  ")
        others = f"\nThe other ranks:\n{self.locations()}" if self.outcomes or self.stopped_at else ""
        kind = pickle.loads(report["kind"]) if "kind" in report else RuntimeError
        return failed(kind, f"rank {rank}: {report['error']}{at}{others}")


def named(ranks: list[str]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"


class Ranks:
    """`n` processes of this machine, in one process group. `ranks(function, *args)` runs `function` on all of them.

    Every call starts with only the default group, with the same seeds on each rank and, on the CPU, one thread per
    rank. It gets copies of the objects it uses, so no state survives to the next call. `timeout_s` may be changed at
    any time. `backend`: "nccl" puts rank r on GPU r, "gloo" all ranks on the CPU; None takes the GPUs if there are
    enough. Raises BadCall if `n` is less than 1 or there are too few GPUs.
    """

    def __init__(self, n: int, backend: str | None = None, timeout_s: float = 60.0, seed: int = 0):
        self.n, self.backend = n, choose_backend(n, backend)
        self.timeout_s, self.seed = timeout_s, seed
        self._numbers = itertools.count(1)  # of calls and of groups
        self._processes: Processes | None = None
        self._in_group = False
        self._ready_processes()

    def __call__(self, function: Callable, *args, **kwargs) -> list:
        """Run `function(*args, **kwargs)` on every rank; return the results by rank.

        Raises the error of the first failing rank (as a RankError too), RanksHung after `timeout_s` seconds, or
        BadCall.
        """
        payload = pickled_call(function, args, kwargs)
        processes = self._ready_processes()
        call = Call(processes, next(self._numbers))
        try:
            call.start(payload, self.seed)
            call.wait(self.timeout_s)
        except KeyboardInterrupt:
            self._break_off(call)
            raise Interrupted(f"the ranks were at\n{call.locations()}") from None
        if not call.ended_well:
            self._break_off(call)
            raise call.error(self.timeout_s)
        self._in_group = call.group_is_clean
        if call.made_groups:
            processes.apply(worker.leave_other_groups)
        return call.results()

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Lower `timeout_s` to `seconds` inside the context, unless it is lower already."""
        before, self.timeout_s = self.timeout_s, min(seconds, self.timeout_s)
        try:
            yield
        finally:
            self.timeout_s = before

    def _ready_processes(self) -> Processes:
        """Return processes in an intact process group; new processes if the old ones cannot form one."""
        for _ in range(2):
            if self._processes is None or not self._processes.folder.is_dir():
                self._processes, self._in_group = Processes(self.n, self.backend), False
            self._in_group = self._in_group or self._processes.join(next(self._numbers))
            if self._in_group:
                return self._processes
            self.close()
        raise RankError(f"{self.n} new processes could not form a process group over this machine's loopback interface")

    def _break_off(self, call: Call) -> None:
        """End a call; kill the processes that do not end."""
        self._in_group = False
        try:
            call.break_off()
        finally:
            if call.pending or call.died:
                self.close()

    def close(self) -> None:
        """End all processes. A later call starts new processes."""
        if self._processes is not None:
            self._processes.close()
        self._processes = None

    def __len__(self) -> int:
        return self.n

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Ranks({self.n}, {self.backend!r})"

    def __reduce__(self):
        raise TypeError("a Ranks object belongs to this kernel and its processes")


_shared: dict[int, Ranks] = {}


def shared(n: int) -> Ranks:
    """Return `n` ranks on the CPU (gloo), which a notebook and its checks share: the same object at each call."""
    if n not in _shared:
        _shared[n] = Ranks(n, "gloo")
    return _shared[n]


def choose_backend(n: int, backend: str | None) -> str:
    """Return the backend for n ranks on this machine. Raises BadCall."""
    import torch

    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise BadCall(f"Ranks({n!r}): the number of ranks is 1 or more")
    device = torch.accelerator.current_accelerator(check_available=True)
    on_gpus = {"cuda": "nccl", "xpu": "xccl"}.get(device.type) if device else None
    gpus = torch.accelerator.device_count() if on_gpus else 0
    if backend is None:
        return on_gpus if on_gpus and gpus >= n else "gloo"
    if backend not in ("gloo", "nccl", "xccl"):
        raise BadCall(f"Ranks({n}, {backend!r}): the backend is gloo, nccl or xccl")
    if backend not in ("gloo", on_gpus):
        gpus = 0  # of the kind that this backend is for
    if backend != "gloo" and gpus < n:
        raise BadCall(
            f"Ranks({n}, {backend!r}): each rank needs a GPU, and this machine has {gpus}; gloo runs on the CPU"
        )
    return backend
