"""Ranks inside a notebook: `Ranks(4)` starts four processes, `ranks(function, *args)` runs a function on each of them.

The default process group is ready, on gloo, or on NCCL where there is a GPU for each rank. A rank that fails, a
deadlock and the interrupt button end in a report by rank, cell and line, and the next call works again. The rank's side
is in `worker`.
"""

import contextlib
import itertools
import pickle
import time
from collections.abc import Callable, Iterator

from course_kit.exercises.install import installed
from course_kit.ranks import worker
from course_kit.ranks.processes import Processes
from course_kit.ranks.report import BadCall, Interrupted, RankError, RanksHung, failed, pickled_call, told_by, where

GRACE_S = 0.5  # for the other ranks, after the first error: they may be about to end, or to fail as well
CUT_S = 0.4  # for ranks that wait for others, once their connections are cut
STOP_S = 3.0  # for all ranks, once they are interrupted
LOOK_S = 0.1  # at a rank that has not ended
ALIVE_S = 0.5  # between two looks at whether its process is there
SHOW_S = 0.5  # between two looks at what the ranks print; a shorter call prints by rank, at its end


class Call:
    """One call on all ranks, under way. `outcomes`: of the ranks that have ended, what `worker.run` returned."""

    def __init__(self, processes: "Processes", number: int):
        self.processes, self.number = processes, number
        self.pending, self.outcomes, self.places, self.died = {}, {}, {}, False
        self.next_look_alive = 0.0

    def start(self, payload: bytes, seed: int) -> None:
        """Have all ranks run the pickled call, with the answers that this kernel's library runs."""
        self.pending = dict(enumerate(self.processes.apply(worker.run, self.number, payload, seed, installed())))

    @property
    def failures(self) -> dict[int, dict]:
        """The reports of the ranks that failed, the cause first: the earliest error that is not a lost connection."""
        reports = [item for item in self.outcomes.items() if "error" in item[1]]
        return dict(sorted(reports, key=lambda item: (item[1]["lost_peer"], item[1]["time_ns"])))

    @property
    def ended_well(self) -> bool:
        return not self.pending and not self.failures

    @property
    def group_is_clean(self) -> bool:
        """Whether all ranks are in the group that they were given, and have used it equally often.

        Otherwise a collective that only some of them have started would meet the next call's.
        """
        sequences = {outcome["sequence"] for outcome in self.outcomes.values()}
        return len(sequences) == 1 and None not in sequences

    @property
    def made_groups(self) -> bool:
        """Whether a rank is in other groups than the default one. They are left when all ranks have ended: a peer that
        is still in its last collective would meet a closed connection.
        """
        return any(outcome["groups"] > 1 for outcome in self.outcomes.values())

    def results(self) -> list:
        """What the ranks returned. Raises RankError where that can't be read here."""
        found = []
        for rank, outcome in sorted(self.outcomes.items()):
            try:
                found.append(pickle.loads(outcome["result"]))
            except Exception as error:
                raise RankError(f"rank {rank}: its result can't be read in this kernel: {error}") from None
        return found

    def wait(self, timeout_s: float) -> None:
        """Wait until all ranks have ended, or until `timeout_s` or the grace after a first failure is over."""
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
        """The outcomes of ranks that have ended since the last time, after a moment's wait for them."""
        next(iter(self.pending.values())).wait(LOOK_S)
        found, look_alive = {}, time.monotonic() > self.next_look_alive
        if look_alive:
            self.next_look_alive = time.monotonic() + ALIVE_S
        for rank in list(self.pending):
            ready = self.pending[rank].ready()  # asked once: it may become so at any time
            if ready and self.pending[rank].successful():
                found[rank] = self.pending.pop(rank).get()
            elif ready or look_alive and not self.processes.alive(rank):
                died = f"its process died without a Python error: {self.processes.death(rank)}"
                found[rank] = {"error": died, "lost_peer": False, "stack": [], "time_ns": time.time_ns()}
                self.died = True
                del self.pending[rank]
        return found

    def break_off(self) -> None:
        """Ask the ranks that still run where they are, then stop them. What they return after that is not kept."""
        self.places = self.processes.where(self.number, list(self.pending))
        for what, patience_s in (("cut", CUT_S), ("interrupt", STOP_S)):
            self.processes.ask(f"{what}-{self.number}")
            deadline = time.monotonic() + patience_s
            while self.pending and time.monotonic() < deadline:
                self.collect()
        self.processes.show_output(rest=True)

    def told(self) -> str:
        """Where the ranks were, those at one place together."""
        ranks_at = {}
        for rank in sorted({*self.outcomes, *self.places}):
            report = self.outcomes.get(rank, {})
            if rank in self.places:
                text = where(self.places[rank])
            elif "error" in report:
                text = "lost its connection" if report["lost_peer"] else report["error"]
                text += told_by(report, "; ")
            else:
                text = "ended"
            ranks_at.setdefault(text, []).append(str(rank))
        names = {text: f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}" for text, ranks in ranks_at.items()}
        return "\n".join(f"  {name}: {text}" for text, name in names.items())

    def error(self, timeout_s: float) -> RankError:
        """What to raise."""
        if not self.failures:
            return RanksHung(f"not all ranks had ended after {timeout_s:g} s (timeout_s). They were at\n{self.told()}")
        rank, report = next(iter(self.failures.items()))
        self.outcomes.pop(rank)
        at = told_by(report, "\n  ")
        others = f"\nThe other ranks:\n{self.told()}" if self.outcomes or self.places else ""
        kind = pickle.loads(report["kind"]) if "kind" in report else RuntimeError
        return failed(kind, f"rank {rank}: {report['error']}{at}{others}")


class Ranks:
    """`n` processes of this machine, in one process group. `ranks(function, *args)` runs `function` on all of them.

    Every call starts with the default group alone, the seeds set (the same on each rank) and, on the CPU, one thread a
    rank. It gets copies of what it uses, so nothing is kept for the next call. `timeout_s` may be changed at any time.
    `backend`: "nccl" puts rank r on GPU r, "gloo" all ranks on the CPU; None takes the GPUs if there are enough.
    Raises BadCall where `n` is not 1 or more or the GPUs are too few.
    """

    def __init__(self, n: int, backend: str | None = None, timeout_s: float = 60.0, seed: int = 0):
        self.n, self.backend = n, choose_backend(n, backend)
        self.timeout_s, self.seed = timeout_s, seed
        self._numbers = itertools.count(1)  # of calls and of groups
        self._processes, self._in_group = None, False
        self._get_ready()

    def __call__(self, function: Callable, *args, **kwargs) -> list:
        """Run `function(*args, **kwargs)` on every rank; the results, by rank.

        Raises what the first failing rank raised (a RankError too), RanksHung after `timeout_s` seconds, or BadCall.
        """
        payload = pickled_call(function, args, kwargs)
        self._get_ready()
        call = Call(self._processes, next(self._numbers))
        try:
            call.start(payload, self.seed)
            call.wait(self.timeout_s)
        except KeyboardInterrupt:
            self._break_off(call)
            raise Interrupted(f"the ranks were at\n{call.told()}") from None
        if not call.ended_well:
            self._break_off(call)
            raise call.error(self.timeout_s)
        self._in_group = call.group_is_clean
        if call.made_groups:
            self._processes.apply(worker.leave_other_groups)
        return call.results()

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Inside, a call ends in a hang report after so many seconds, or after `timeout_s` if that is less."""
        before, self.timeout_s = self.timeout_s, min(seconds, self.timeout_s)
        try:
            yield
        finally:
            self.timeout_s = before

    def _get_ready(self) -> None:
        """Have processes, in a process group that no earlier call has broken; new ones where the old can't make one."""
        for _ in range(2):
            if self._processes is None or not self._processes.folder.is_dir():
                self._processes, self._in_group = Processes(self.n, self.backend), False
            self._in_group = self._in_group or self._processes.join(next(self._numbers))
            if self._in_group:
                return
            self.close()
        raise RankError(f"{self.n} new processes could not form a process group over this machine's loopback interface")

    def _break_off(self, call: "Call") -> None:
        """End a call; what does not end is killed."""
        self._in_group = False
        try:
            call.break_off()
        finally:
            if call.pending or call.died:
                self.close()

    def close(self) -> None:
        """End all processes. A later call starts new ones."""
        if self._processes is not None:
            self._processes.close()
        self._processes = None

    def __len__(self) -> int:
        return self.n

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Ranks({self.n}, {self.backend!r})"

    def __reduce__(self):
        raise TypeError("it is this kernel's hold on other processes")


_shared: dict[int, Ranks] = {}


def shared(n: int) -> Ranks:
    """`n` ranks on the CPU (gloo) that a notebook and its checks have in common: the same object at each call."""
    if n not in _shared:
        _shared[n] = Ranks(n, "gloo")
    return _shared[n]


def choose_backend(n: int, backend: str | None) -> str:
    """The backend for n ranks on this machine. Raises BadCall."""
    import torch

    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise BadCall(f"Ranks({n!r}): the number of ranks is 1 or more")
    device = torch.accelerator.current_accelerator(check_available=True)
    on_gpus = {"cuda": "nccl", "xpu": "xccl"}.get(device.type if device else None)
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
