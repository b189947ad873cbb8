"""course_kit.ranks.calls: calls, reports of errors and hangs, interrupts, and that no process stays. Ranks on the CPU,
gloo.

Notebooks are real Jupyter kernels. The last test wants CUDA.
"""

import collections
import contextlib
import importlib
import inspect
import itertools
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.distributed as dist

import rank_entry
from course_kit.ranks import Ranks, choose_backend
from course_kit.ranks.calls import Call
from course_kit.ranks.connections import prepare_backend
from course_kit.ranks.processes import free_ports, wait_until_connected
from course_kit.ranks.report import describe_line
from course_kit.sweep import rank as sweep_rank

psutil = pytest.importorskip("psutil")  # a GPU node may have neither
pytest.importorskip("ipyparallel")

HERE = os.path.relpath(__file__)
LOCK = threading.Lock()  # nothing can pickle it
PATIENCE_S = 300  # a deadline for what hangs; no step takes a twentieth of it on a quiet machine
GONE_S = 60  # for processes to end, which takes a second: a deadline against hangs


def test_kernels_that_start_at_once_choose_other_ports():
    """Before the first one's controller has bound its own."""
    rows = [free_ports(4) for _ in range(3)]
    assert len({first for first, _ in rows}) == 3
    for _, mark in rows:
        mark.close()


@pytest.fixture(scope="module")
def pair():
    """Two ranks, for the faults that cost a new start."""
    with Ranks(2, "gloo") as two:
        yield two


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder for temporary files of what a test starts in this process."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def total() -> float:
    """Return what all ranks add up to."""
    mine = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(mine)
    return mine.item()


def line(function, number: int) -> str:
    """Return where a report sees a line of this file, counted from the function's `def`."""
    return f"{HERE}, line {function.__code__.co_firstlineno + number}: "


def started(pid: int | None = None) -> list[psutil.Process]:
    """Return the processes that a process, or this one, has started and that still run."""
    return still_running(psutil.Process(pid).children(recursive=True))


def still_running(processes: list[psutil.Process]) -> list[psutil.Process]:
    def runs(process):
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return [process for process in processes if runs(process)]


def assert_gone(processes: list[psutil.Process], folder: Path) -> None:
    """In time, the processes have ended and their temporary folder is removed."""
    deadline = time.monotonic() + GONE_S
    try:
        while time.monotonic() < deadline and (still_running(processes) or list(folder.glob("ranks-*"))):
            time.sleep(0.05)
        assert (still_running(processes), list(folder.glob("ranks-*"))) == ([], [])
    finally:
        for process in still_running(processes):
            process.kill()


# --- a call


def scaled(factor, plus=0):
    return factor * dist.get_rank() + plus


def test_results_come_by_rank(ranks):
    assert ranks(scaled, 3, plus=1) == [1, 4, 7, 10]
    assert ranks(lambda: dist.get_rank()) == [0, 1, 2, 3]
    assert len(ranks) == 4
    (tensor, *_) = ranks(torch.arange, 3)
    assert torch.equal(tensor, torch.arange(3))


def how_kernels_run() -> tuple:
    """Return whether Triton interprets here, and what a child process would inherit of it."""
    import triton

    child = subprocess.run(["env"], capture_output=True, text=True).stdout.splitlines()
    return triton.knobs.runtime.interpret, [line for line in child if line.startswith("TRITON_INTERPRET")]


def test_ranks_on_the_cpu_interpret_kernels_and_their_children_choose_for_themselves(ranks):
    pytest.importorskip("triton")
    own = os.environ.get("TRITON_INTERPRET")
    assert ranks(how_kernels_run) == [(True, [] if own is None else [f"TRITON_INTERPRET={own}"])] * 4


def surroundings() -> dict:
    return {
        "size": dist.get_world_size(),
        "rank": (dist.get_rank(), int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])),
        "backend": dist.get_backend(),
        "sum": total(),
        "device": str(torch.zeros(1).device),
        "GPUs": torch.cuda.device_count(),
        "threads": torch.get_num_threads(),
        "drawn": (random.random(), numpy.random.rand(), torch.rand(1).item()),
    }


def test_a_call_finds_the_group_ready_one_thread_and_the_seeds_set(ranks):
    first, again = ranks(surroundings), ranks(surroundings)
    assert first == again
    assert [found.pop("rank") for found in first] == [(rank, rank, rank) for rank in range(4)]
    assert all(found == first[0] for found in first), "all but the rank is the same on each rank"
    drawn = first[0].pop("drawn")
    assert first[0] == {"size": 4, "backend": "gloo", "sum": 6, "device": "cpu", "GPUs": 0, "threads": 1}
    random.seed(0), numpy.random.seed(0)
    assert drawn == (random.random(), numpy.random.rand(), torch.rand(1, generator=torch.manual_seed(0)).item())


def test_ranks_are_forked_from_one_process_that_has_imported_pytorch(ranks):
    (parent,) = set(ranks(os.getppid))
    assert "libtorch_cpu" in Path(f"/proc/{parent}/maps").read_text()
    loaded = ranks(lambda: {"torch._dynamo", "torch.distributed"} <= sys.modules.keys())
    assert parent != os.getpid() and all(loaded)


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a scheduler of Linux")
def test_a_thread_of_a_rank_that_wakes_up_waits_for_its_turn(ranks):
    assert set(ranks(os.sched_getscheduler, 0)) == {os.SCHED_BATCH}


def test_calls_start_no_process_and_make_no_group(ranks):
    def kept():
        folder = ranks._processes.folder
        return ranks(os.getpid), sorted(folder.glob("*.process")), sorted(folder.glob("store-*"))

    before = kept()
    assert [ranks(total) for _ in range(5)] == [[6] * 4] * 5
    assert kept() == before


def groups(new: bool = False) -> int:
    if new:
        made = dist.new_group([0, 1])
        dist.new_group(list(range(dist.get_world_size())))
        if dist.get_rank() < 2:
            dist.all_reduce(torch.ones(1), group=made)
    return len(dist.distributed_c10d._world.pg_map)


def test_groups_of_a_call_are_gone_in_the_next(ranks):
    assert ranks(groups, new=True) == [3, 3, 2, 2]
    assert ranks(groups) == [1] * 4
    assert ranks(groups, new=True) == [3, 3, 2, 2]


def leave(how: str) -> None:
    rank = dist.get_rank()
    if how == "no group":
        dist.destroy_process_group()
    elif how == "a group of its own":
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    elif how == "threads":
        torch.set_num_threads(3)
    elif how == "a random state":
        random.random(), torch.rand(rank + 1)
    elif how == "a thread that runs":
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    elif how == "a collective that not all have called" and rank == 0:
        dist.all_reduce(torch.ones(1), async_op=True)
    elif how == "a message that nobody received" and rank == 0:
        dist.isend(torch.ones(1), 1)


@pytest.mark.parametrize(
    "how",
    [
        "no group",
        "a group of its own",
        "threads",
        "a random state",
        "a thread that runs",
        "a collective that not all have called",
        "a message that nobody received",
    ],
)
def test_what_a_call_leaves_behind_does_not_reach_the_next(how, ranks, monkeypatch):
    expected = ranks(surroundings)
    ranks(leave, how)
    monkeypatch.setattr(ranks, "timeout_s", 3)
    try:
        assert ranks(surroundings) == expected
    finally:
        with pytest.raises(ZeroDivisionError):
            ranks(lambda: 1 / 0)  # a new group, whatever happened
        ranks(torch.set_num_threads, 1)


# --- what ranks print


def prints(rank_that_fails: int | None = None) -> None:
    print("begins ", end="", flush=True)
    time.sleep(0.2)
    print("and ends")
    print("to stderr", file=sys.stderr)
    if dist.get_rank() == rank_that_fails:
        raise ValueError("planted")
    print("last", end="")


def test_printed_lines_come_whole_and_with_their_rank(ranks, capsys):
    ranks(prints)
    out, err = capsys.readouterr()
    whole = ["begins and ends", "to stderr", "last"]
    assert sorted(out.splitlines()) == sorted(f"[rank {rank}] {text}" for rank in range(4) for text in whole)
    assert out.endswith("\n") and err == ""
    for rank in range(4):
        of_rank = [text for text in out.splitlines() if text.startswith(f"[rank {rank}]")]
        assert of_rank == [f"[rank {rank}] {text}" for text in whole], "a rank's own lines keep their order"


def test_what_was_printed_before_an_error_is_shown(ranks, capsys):
    with pytest.raises(ValueError, match="planted"):
        ranks(prints, rank_that_fails=2)
    assert "[rank 2] begins and ends\n" in capsys.readouterr().out


def odd_output() -> None:
    print("a form feed\fand a separator\u2028are in this line")
    sys.stdout.flush()
    sys.stdout.buffer.write(b"not \xff UTF-8\n")
    sys.stdout.buffer.flush()


def test_odd_characters_neither_break_nor_split_a_line(ranks, capsys):
    ranks(odd_output)
    out = capsys.readouterr().out
    assert out.count("[rank 0] ") == 2 and "[rank 0] not \ufffd UTF-8\n" in out


def test_much_output_arrives_in_full(ranks, capsys):
    ranks(lambda: print("\n".join(map(str, range(20_000)))))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 80_000 and lines.count("[rank 3] 19999") == 1


def test_warnings_of_the_log_come_in_every_call(ranks, capsys):
    for text in ("first", "second"):
        ranks(logging.warning, text)
        lines = capsys.readouterr().out.splitlines()
        assert sorted(lines) == [f"[rank {rank}] WARNING:root:{text}" for rank in range(4)]


# --- errors


def divides() -> None:
    if dist.get_rank() == 1:
        inner_divides()
    dist.all_reduce(torch.ones(1))


def inner_divides() -> None:
    1 / 0


def test_an_error_names_the_rank_its_lines_and_what_the_others_waited_in(ranks):
    with pytest.raises(ZeroDivisionError) as caught:
        ranks(divides)
    assert str(caught.value).splitlines() == [
        "rank 1: ZeroDivisionError: division by zero",
        f"  {line(inner_divides, 1)}1 / 0",
        f"      called from {line(divides, 2)}inner_divides()",
        "The other ranks:",
        f"  ranks 0, 2, 3: in all_reduce, {line(divides, 3)}dist.all_reduce(torch.ones(1))",
    ]
    assert ranks(total) == [6] * 4


def without_rights() -> None:
    if dist.get_rank() == 0:
        os.seteuid(65534)  # nobody, who may not look into the folder over which the kernel asks
        time.sleep(0.5)
        os.seteuid(0)


def rewords() -> None:
    try:
        inner_divides()
    except ZeroDivisionError as error:
        raise ValueError("in other words") from error


def test_an_error_in_other_words_names_the_line_of_the_first_one(ranks):
    with pytest.raises(ValueError) as caught:
        ranks(rewords)
    assert "ValueError: in other words" in str(caught.value).splitlines()[0]
    assert str(caught.value).splitlines()[1:3] == [
        f"  {line(inner_divides, 1)}1 / 0",
        f"      called from {line(rewords, 2)}inner_divides()",
    ]


def test_a_line_of_the_library_has_its_whole_path():
    count_traffic = importlib.import_module("course_lib.collectives.traffic").count_traffic
    code, first = inspect.getsourcelines(count_traffic)
    told = describe_line(inspect.getsourcefile(count_traffic), first)
    expected = f"course_lib/collectives/traffic.py, line {first}: "
    assert told == expected + code[0].strip()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs the rights of root")
def test_a_rank_answers_again_after_it_could_not_look_into_the_folder(ranks):
    ranks(without_rights)
    with pytest.raises(ZeroDivisionError, match="ranks 0, 2, 3: in all_reduce"):
        ranks(divides)


def fail_in_turn() -> None:
    rank = dist.get_rank()
    dist.barrier()  # from here on the ranks are in step
    if rank == 0:
        return
    time.sleep(0.15 * (3 - rank))
    raise [None, OSError, IndexError, LookupError][rank]("from rank", rank)


def test_the_first_error_is_the_one_that_is_raised(ranks):
    with pytest.raises(LookupError) as caught:
        ranks(fail_in_turn)
    first, *others = str(caught.value).splitlines()
    assert first == "rank 3: LookupError: ('from rank', 3)"
    assert others[2] == "  rank 0: ended"
    assert [text[:24] for text in others[3:]] == ["  rank 1: OSError: [Errn", "  rank 2: IndexError: ('"]


def test_ranks_that_fail_alike_are_told_together(ranks):
    with pytest.raises(ZeroDivisionError) as caught:
        ranks(inner_divides)
    lines = str(caught.value).splitlines()
    assert len(lines) == 4 and lines[1] == f"  {line(inner_divides, 1)}1 / 0"
    assert lines[3].startswith("  ranks ") and lines[3].endswith(f"division by zero; {line(inner_divides, 1)}1 / 0")


class TwoArguments(RuntimeError):
    def __init__(self, a, b):
        super().__init__(a + b)


class OfResponse(RuntimeError):
    def __init__(self, response):
        super().__init__(response.text)


class NoArguments(RuntimeError):
    def __init__(self, code):
        super().__init__()


class NoText(Exception):
    def __str__(self):
        raise TypeError("no text")


class HoldsLock(Exception):
    def __init__(self):
        super().__init__("locked")
        self.lock = LOCK


ODD_ERRORS = {
    "a key": (lambda: KeyError("missing"), KeyError, "KeyError: 'missing'"),
    "an exercise": (lambda: NotImplementedError(), NotImplementedError, "NotImplementedError"),
    "two arguments": (lambda: TwoArguments("a", "b"), TwoArguments, "TwoArguments: ab"),
    "a response": (lambda: OfResponse(SimpleNamespace(text="404")), OfResponse, "OfResponse: 404"),
    "no arguments": (lambda: NoArguments(3), NoArguments, "NoArguments"),
    "no text": (lambda: NoText(), NoText, "NoText"),
    "a lock": (lambda: HoldsLock(), HoldsLock, "HoldsLock: locked"),
    "five arguments": (lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "why"), UnicodeDecodeError, "why"),
    "an errno": (lambda: FileNotFoundError(2, "none", "a.txt"), OSError, "[Errno 2] none: 'a.txt'"),
    "a group": (lambda: ExceptionGroup("both", [ValueError()]), RuntimeError, "ExceptionGroup: both"),
    "the end": (lambda: SystemExit(3), RuntimeError, "SystemExit: 3"),
    "an interrupt": (lambda: KeyboardInterrupt(), RuntimeError, "KeyboardInterrupt"),
    "long": (lambda: ValueError("x" * 10**6), ValueError, "x" * 1000),
}


def raise_on_rank_3(name: str) -> None:
    if dist.get_rank() == 3:
        raise ODD_ERRORS[name][0]()


@pytest.mark.parametrize("name", ODD_ERRORS)
def test_an_error_of_any_make_is_caught_by_its_type(name, ranks):
    _, kind, text = ODD_ERRORS[name]
    with pytest.raises(Exception) as caught:
        ranks(raise_on_rank_3, name)
    assert isinstance(caught.value, RuntimeError) and isinstance(caught.value, kind)
    first, at, *_ = str(caught.value).splitlines()
    assert first.startswith("rank 3: ") and text in first
    assert at == f"  {line(raise_on_rank_3, 2)}raise ODD_ERRORS[name][0]()"
    assert ranks(total) == [6] * 4


def descend(depth: int) -> None:
    descend(depth + 1)


def test_a_function_may_name_an_attribute_as_a_torch_config_module_is_named(ranks):
    """cloudpickle takes torch.distributed.config along for `.config`, and can't pickle it."""

    def name(model):
        return f"{model.config} of {dist.get_world_size()}"

    assert ranks(name, types.SimpleNamespace(config="tiny")) == ["tiny of 4"] * 4


def test_an_endless_recursion_is_told_in_a_page(ranks):
    with pytest.raises(RecursionError) as caught:
        ranks(descend, 0)
    assert line(descend, 1) in str(caught.value) and len(str(caught.value).splitlines()) < 100


@pytest.mark.parametrize(
    "result, expected",
    [
        (lambda: torch.zeros(129, 2**18), "129 MiB, and the limit is 128 MiB"),
        (lambda: (i for i in range(3)), "(of type generator) can't be sent back"),
    ],
)
def test_a_result_that_can_not_come_back_is_an_error_of_its_rank(result, expected, ranks):
    with pytest.raises(ValueError) as caught:
        ranks(lambda: result() if dist.get_rank() == 0 else None)
    assert str(caught.value).startswith("rank 0: ValueError: the result ") and expected in str(caught.value)
    assert ranks(total) == [6] * 4


# --- hangs


def receives() -> None:
    print("before")
    dist.recv(torch.zeros(1), (dist.get_rank() + 1) % 4)


def loops() -> None:
    while True:
        pass


def sleeps() -> None:
    if dist.get_rank() > 1:
        time.sleep(600)


def mismatches() -> None:
    if dist.get_rank() == 0:
        dist.barrier()
        return
    parts = [torch.zeros(10**6) for _ in range(4)]
    dist.all_gather(parts, torch.zeros(10**6))


@pytest.mark.parametrize(
    "function, expected",
    [
        (receives, [f"  ranks 0, 1, 2, 3: in recv, {line(receives, 2)}dist.recv("]),
        (loops, [f": {line(loops, 1)}while True:", f": {line(loops, 2)}pass"]),  # not all at the same one
        (sleeps, ["  ranks 0, 1: ended", f"  ranks 2, 3: {line(sleeps, 2)}time.sleep(600)"]),
        (mismatches, [f"in barrier, {line(mismatches, 2)}", f"in all_gather, {line(mismatches, 5)}"]),
    ],
)
def test_a_hang_ends_in_every_ranks_line_and_the_next_call_works(function, expected, ranks, monkeypatch, capsys):
    monkeypatch.setattr(ranks, "timeout_s", 3)  # four ranks that loop on two cores may be late to begin
    with pytest.raises(TimeoutError) as caught:
        ranks(function)
    first, *places = str(caught.value).splitlines()
    assert first == "not all ranks had ended after 3 s (timeout_s). They were at"
    assert all(any(text in place for text in expected) for place in places), places
    assert sum(place.split(":")[0].count(str(rank)) for place in places for rank in range(4)) == 4, "each rank once"
    if function is receives:
        assert sorted(capsys.readouterr().out.splitlines()) == [f"[rank {rank}] before" for rank in range(4)]
    monkeypatch.setattr(ranks, "timeout_s", 60)
    assert ranks(total) == [6] * 4


def test_the_timeout_is_a_minute_unless_told_otherwise(ranks):
    assert inspect.signature(Ranks).parameters["timeout_s"].default == 60 < ranks.timeout_s


def swallows() -> None:
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(600)


def kills_itself() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def exits() -> None:
    if dist.get_rank() == 0:
        os._exit(0)


def does_not_fit() -> None:
    dist.all_reduce(torch.zeros(8 if dist.get_rank() else 4))


@pytest.mark.parametrize(
    "function, expected",
    [
        (swallows, [f"ranks 0, 1: {line(swallows, 3)}time.sleep(600)"]),
        (kills_itself, ["rank 1: its process died", "SIGKILL", f"in barrier, {line(kills_itself, 3)}dist.barrier()"]),
        (exits, ["rank 0: its process died", "it ended itself, with exit status 0", "rank 1: ended"]),
        (does_not_fit, ["error: SIGABRT, compiled code gave up, as gloo does where a message"]),
    ],
)
def test_processes_that_are_lost_are_started_anew(function, expected, pair, monkeypatch):
    pair(total)
    monkeypatch.setattr("course_kit.ranks.calls.STOP_S", 0.5)
    monkeypatch.setattr(pair, "timeout_s", 1)
    before = pair(os.getpid)
    with pytest.raises(RuntimeError) as caught:
        pair(function)
    assert all(text in str(caught.value) for text in expected)
    monkeypatch.setattr(pair, "timeout_s", 60)
    assert pair(total) == [1, 1]
    assert not set(before) & set(pair(os.getpid)) and not any(map(psutil.pid_exists, before))


def test_a_result_that_comes_between_two_looks_is_no_death():
    """The client's thread brings it at any time."""
    looks, outcome = iter([False, True, True]), {"result": b"", "sequence": 1, "groups": 1}
    result = SimpleNamespace(
        ready=lambda: next(looks), successful=lambda: True, get=lambda: outcome, wait=lambda timeout: None
    )
    call = Call(SimpleNamespace(alive=lambda rank: True, death=lambda rank: "of nothing"), 1)
    call.pending = {0: result}
    assert call.collect() == {} and call.collect() == {0: outcome} and not call.died


# --- bad use


@pytest.mark.parametrize("n", [0, -1, 1.5, True, "4", None])
def test_a_bad_number_of_ranks_gets_one_line_and_starts_nothing(n):
    before = started()
    with pytest.raises(ValueError) as caught:
        Ranks(n)
    assert str(caught.value) == f"Ranks({n!r}): the number of ranks is 1 or more"
    assert started() == before


@pytest.fixture
def machine_with(monkeypatch):
    """Make this machine one with so many GPUs."""

    def give(gpus: int, kind: str = "cuda") -> None:
        device = torch.device(kind) if gpus else None
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: device)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)

    return give


@pytest.mark.parametrize(
    "gpus, kind, backend, chosen",
    [
        (0, "cuda", None, "gloo"),
        (1, "cuda", None, "gloo"),
        (3, "cuda", None, "gloo"),
        (4, "cuda", None, "nccl"),
        (8, "cuda", None, "nccl"),
        (8, "cuda", "gloo", "gloo"),
        (8, "cuda", "nccl", "nccl"),
        (8, "xpu", None, "xccl"),
        (1, "mps", None, "gloo"),
    ],
)
def test_the_backend_is_that_of_the_gpus_where_there_is_one_for_each_rank(gpus, kind, backend, chosen, machine_with):
    machine_with(gpus, kind)
    assert choose_backend(4, backend) == chosen


@pytest.mark.parametrize(
    "gpus, kind, backend, expected",
    [
        (0, "cuda", "nccl", "each rank needs a GPU, and this machine has 0; gloo runs on the CPU"),
        (1, "cuda", "nccl", "each rank needs a GPU, and this machine has 1; gloo runs on the CPU"),
        (1, "mps", "nccl", "each rank needs a GPU, and this machine has 0; gloo runs on the CPU"),
        (8, "cuda", "xccl", "xccl"),
        (8, "xpu", "nccl", "nccl"),
        (0, "cuda", "mpi", "the backend is gloo, nccl or xccl"),
        (8, "cuda", "NCCL", "the backend is gloo, nccl or xccl"),
    ],
)
def test_a_backend_that_this_machine_can_not_have_gets_one_line(gpus, kind, backend, expected, machine_with):
    machine_with(gpus, kind)
    before = started()
    with pytest.raises(ValueError) as caught:
        choose_backend(4, backend)
    assert str(caught.value).startswith(f"Ranks(4, {backend!r}): ") and expected in str(caught.value)
    with pytest.raises(ValueError):
        Ranks(4, backend)
    assert "\n" not in str(caught.value) and started() == before


class Holder:
    """An object with a lock."""

    def __init__(self):
        self.lock = LOCK

    def use(self):
        pass


def unpicklable() -> dict:
    """Calls that can't be sent: function, arguments, and what the message starts with."""
    lock, holder = LOCK, Holder()

    def uses_closure():
        return lock

    def uses_global():
        return LOCK

    def calls():
        return uses_global()

    def in_comprehension():
        return [LOCK.locked() for _ in range(3)]

    def in_inner():
        def inner():
            return LOCK

        return inner()

    def default(lock=LOCK):
        pass

    def with_unset():
        return unset, lock

    if holder is None:
        unset = 1
    return {
        "argument": (total, (1, LOCK), {}, "argument 2 (of type lock) can't"),
        "keyword": (total, (), {"x": {"a": [1, LOCK]}}, "x['a'][1] (of type lock) can't"),
        "object": (total, (holder,), {}, "argument 1 (of type Holder) can't"),
        "global": (uses_global, (), {}, "LOCK (of type lock) in uses_global can't"),
        "closure": (uses_closure, (), {}, "lock (of type lock) in uses_closure can't"),
        "called": (calls, (), {}, "LOCK (of type lock) in uses_global in calls can't"),
        "comprehension": (in_comprehension, (), {}, "LOCK (of type lock) in in_comprehension can't"),
        "inner function": (in_inner, (), {}, "LOCK (of type lock) in in_inner can't"),
        "default": (default, (), {}, "lock (of type lock) in default can't"),
        "method": (holder.use, (), {}, "use (of type method) can't"),
        "unset closure": (with_unset, (), {}, "lock (of type lock) in with_unset can't"),
    }


@pytest.mark.parametrize("case", unpicklable())
def test_what_can_not_be_sent_is_named_in_one_line(case, ranks):
    function, args, kwargs, expected = unpicklable()[case]
    with pytest.raises(ValueError) as caught:
        ranks(function, *args, **kwargs)
    assert str(caught.value).startswith(expected) and "\n" not in str(caught.value)


def test_other_bad_calls_get_one_line(ranks):
    for function, expected in ((3, "3 is not"), (None, "None is not"), (lambda: ranks, "ranks (of type Ranks)")):
        with pytest.raises(ValueError) as caught:
            ranks(function)
        assert expected in str(caught.value) and "\n" not in str(caught.value)


# --- starts and ends


def test_an_engine_is_asked_until_it_answers():
    """It may have registered and not yet be connected: what is sent to it then is lost."""

    class Engine:
        asked = 0

        def apply_async(self, function):
            self.asked += 1
            return self

        def wait(self, timeout):
            return self.asked == 3

    engine = Engine()
    wait_until_connected(engine)
    assert engine.asked == 3


def test_close_ends_all_and_a_later_call_starts_again(temporary):
    before = started()
    one = Ranks(1, "gloo")
    new = [process for process in started() if process not in before]
    assert len(new) >= 2 and len(list(temporary.glob("ranks-*"))) == 1
    one.close()
    assert_gone(new, temporary)
    one.close()
    assert one(total) == [0]
    new = [process for process in started() if process not in before]
    del one  # what a notebook does where it makes `ranks` again
    assert_gone(new, temporary)


CLOSES = """
import time
import psutil
from course_kit.ranks import Ranks

def kept():
    me = psutil.Process()
    return me.num_fds(), me.num_threads(), len(me.children())

Ranks(1, "gloo").close()  # what the first one loads for good
time.sleep(1)
before = kept()
Ranks(1, "gloo").close()
deadline = time.monotonic() + 60
while time.monotonic() < deadline and kept() != before:
    time.sleep(0.05)
print(before, kept())
"""


def gloo_threads(groups: int) -> int:
    """Return how many threads of this process serve connections, with so many more groups."""
    made = [dist.new_group() for _ in range(groups)]
    assert all(int(together(group)) == 2 for group in made)
    names = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return names.count("gloo_tcp_loop")


def together(group) -> torch.Tensor:
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    return value


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_all_groups_of_a_process_share_one_thread(pair):
    """It wakes up a hundred times a second, whatever there is to do."""
    if pair(gloo_threads, 0) == [0, 0]:
        pytest.skip("this PyTorch's gloo (2.11's is one) gives its threads no names")
    assert pair(gloo_threads, 0) == pair(gloo_threads, 3) == [1, 1]


def test_nothing_is_kept_of_a_closed_group_of_ranks():
    """Files, threads, and children with zombies, of a process that does nothing else."""
    done = subprocess.run([sys.executable, "-c", CLOSES], capture_output=True, text=True, timeout=3 * PATIENCE_S)
    before, after = done.stdout.strip().replace(") (", ")|(").split("|")
    assert after == before, done.stderr


FORKS = """
import os, sys
from course_kit.ranks import Ranks
ranks = Ranks(1, "gloo")
if (child := os.fork()) == 0:
    sys.exit()
os.waitpid(child, 0)
print(ranks(lambda: 7))
"""


def test_a_forked_child_that_ends_leaves_the_ranks_alone():
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout == "[7]\n", done.stderr


class Notebook:
    """A Jupyter kernel, and its folder for temporary files."""

    def __init__(self, folder: Path):
        from jupyter_client import KernelManager

        from course_kit.local_kernel import use_private_sockets

        self.folder, self.manager = folder, KernelManager()
        use_private_sockets(self.manager)
        self.manager.start_kernel(env=os.environ | {"TMPDIR": str(folder)})
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE_S)
        self.pid = self.manager.provisioner.process.pid
        self.run("import time, torch, torch.distributed as dist; from course_kit.ranks import Ranks")

    def start(self, code: str) -> str:
        """Have a cell executed, without waiting for it."""
        return self.client.execute(code)

    def finish(self, cell: str, until: str | None = None) -> SimpleNamespace:
        """Wait for a cell to end, or until its output has the text; gives its number, its output, and its error."""
        seen = SimpleNamespace(number=0, output="", error=None)
        deadline = time.monotonic() + PATIENCE_S
        while until is None or until not in seen.output:
            message = self.client.get_iopub_msg(timeout=deadline - time.monotonic())
            if message["parent_header"].get("msg_id") == cell:
                content = message["content"]
                seen.number = content.get("execution_count", seen.number)
                seen.output += content.get("text", "")
                seen.error = content if message["msg_type"] == "error" else seen.error
                if content.get("execution_state") == "idle":
                    break
        return seen

    def run(self, code: str) -> SimpleNamespace:
        return self.finish(self.start(code))

    def end(self, how: str) -> None:
        if how == "SIGKILL":
            os.kill(self.pid, signal.SIGKILL)
        self.manager.shutdown_kernel(now=how == "SIGKILL")
        self.client.stop_channels()


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """A kernel with four ranks."""
    kernel = Notebook(tmp_path_factory.mktemp("notebook"))
    made = kernel.run("ranks = Ranks(4, 'gloo', timeout_s=30)")
    assert (made.output, made.error) == ("", None), "starting is silent"
    kernel.run(f"{inspect.getsource(total)}")
    yield kernel
    kernel.end("shutdown")


@pytest.fixture
def another(tmp_path):
    """A second kernel, of one test; what it has started ends with the test."""
    kernel = Notebook(tmp_path)
    yield kernel
    if kernel.manager.is_alive():
        kernel.end("SIGKILL")


def test_a_notebook_shows_an_error_by_cell_and_line_alone(notebook):
    failed = notebook.run("def step():\n    if dist.get_rank() == 2:\n        [][3]\n    dist.barrier()\nranks(step)")
    cell = f"Cell In[{failed.number}], line"
    shown = [
        "RankFailed(IndexError): rank 2: IndexError: list index out of range",
        f"  {cell} 3: [][3]",
        "The other ranks:",
        f"  ranks 0, 1, 3: in barrier, {cell} 4: dist.barrier()",
    ]
    assert "\n".join(failed.error["traceback"]).splitlines() == shown
    assert notebook.run("try: ranks(step)\nexcept IndexError: print('caught')").output == "caught\n"
    assert notebook.run("class Own(Exception): pass\ndef own(): raise Own").error is None
    assert notebook.run("try: ranks(own)\nexcept Own: print('caught')").output == "caught\n"
    assert notebook.run("print(ranks(total))").output == "[6.0, 6.0, 6.0, 6.0]\n"


def test_a_notebook_shows_bad_use_in_one_line(notebook):
    for code, expected in (
        ("Ranks(0)", "BadCall: Ranks(0): the number of ranks is 1 or more"),
        ("lock = __import__('threading').Lock()\nranks(lambda: lock)", "BadCall: lock (of type lock) in <lambda> "),
        ("ranks(3)", "BadCall: ranks(function, ...) runs a function, and 3 is not callable"),
    ):
        shown = "\n".join(notebook.run(code).error["traceback"])
        assert shown.startswith(expected) and "\n" not in shown


def test_a_rank_that_exits_does_not_end_the_kernel(notebook):
    failed = notebook.run("import sys\nranks(lambda: sys.exit(3))")
    assert failed.error["evalue"].startswith("rank ") and "SystemExit: 3" in failed.error["evalue"]
    assert notebook.run("print(ranks(total))").output == "[6.0, 6.0, 6.0, 6.0]\n"


@pytest.mark.parametrize(
    "waits, shown",
    [("time.sleep(600)", ""), ("dist.recv(torch.zeros(1), (dist.get_rank() + 1) % 4)", "in recv, ")],
)
def test_the_interrupt_button_stops_all_ranks_and_the_next_cell_works(waits, shown, notebook):
    cell = notebook.start(f"def wait():\n    print('here')\n    {waits}\nranks(wait)")
    notebook.finish(cell, until="here\n")
    time.sleep(0.3)
    notebook.manager.interrupt_kernel()
    stopped = notebook.finish(cell)
    report = "\n".join(stopped.error["traceback"])
    assert report.startswith(f"Interrupted: the ranks were at\n  ranks 0, 1, 2, 3: {shown}Cell In[")
    assert report.endswith(f"], line 3: {waits}") and "Traceback" not in report
    assert notebook.run("print(ranks(total))").output == "[6.0, 6.0, 6.0, 6.0]\n"


def test_an_interrupted_start_leaves_nothing(notebook):
    before, folders = started(notebook.pid), set(notebook.folder.glob("ranks-*"))
    cell = notebook.start("Ranks(2, 'gloo')")
    deadline = time.monotonic() + PATIENCE_S
    while len(started(notebook.pid)) < len(before) + 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    new = [process for process in started(notebook.pid) if process not in before]
    notebook.manager.interrupt_kernel()
    assert notebook.finish(cell).error["ename"] == "KeyboardInterrupt"
    new += [process for process in started(notebook.pid) if process not in [*before, *new]]
    deadline = time.monotonic() + GONE_S
    while time.monotonic() < deadline and (still_running(new) or set(notebook.folder.glob("ranks-*")) != folders):
        time.sleep(0.05)
    assert still_running(new) == [] and set(notebook.folder.glob("ranks-*")) == folders
    assert notebook.run("print(ranks(total))").output == "[6.0, 6.0, 6.0, 6.0]\n"


def test_ranks_that_a_notebook_makes_again_after_an_error_replace_those_of_before(notebook):
    before = started(notebook.pid)
    notebook.run("few = Ranks(1, 'gloo')")
    new = [process for process in started(notebook.pid) if process not in before]
    assert len(new) >= 2
    assert notebook.run("few(lambda: 1 / 0)").error
    notebook.run("few = None")
    deadline = time.monotonic() + GONE_S
    while time.monotonic() < deadline and still_running(new):
        time.sleep(0.05)
    left = still_running(new)
    for process in left:
        process.kill()
    assert left == []


def test_two_notebooks_at_once_do_not_disturb_each_other(notebook, another):
    """One fails, hangs, and is killed in a call without end; the ranks of the other go on, and none of its own stay."""
    for code in ("two = Ranks(2, 'gloo', timeout_s=1)", "two(lambda: 1 / 0)", "two(lambda: time.sleep(600))"):
        cell = another.start(code)
        for _ in range(5):
            assert notebook.run("print(ranks(total))").output == "[6.0, 6.0, 6.0, 6.0]\n"
        ended = another.finish(cell)
        expected = {"1": "RankFailed(ZeroDivisionError)", "t": "RanksHung"}.get(code[12:13])
        assert (ended.error and ended.error["ename"]) == expected
    another.run("two.timeout_s = 600")
    cell = another.start("def hang():\n    print('here')\n    dist.recv(torch.zeros(1), 0)\ntwo(hang)")
    another.finish(cell, until="here\n")
    processes = started(another.pid)
    assert len(processes) >= 3
    cell = notebook.start("print([ranks(total) for _ in range(100)] == 100 * [4 * [6.0]])")
    another.end("SIGKILL")
    assert_gone(processes, another.folder)
    assert notebook.finish(cell).output == "True\n"


def test_a_kernel_that_is_killed_while_ranks_start_leaves_nothing(another):
    another.start("ranks = Ranks(4, 'gloo')")
    deadline = time.monotonic() + PATIENCE_S
    while len(started(another.pid)) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    processes = started(another.pid)
    assert len(processes) >= 4
    another.end("SIGKILL")
    assert_gone(processes, another.folder)


def test_a_kernel_that_is_shut_down_leaves_nothing(another):
    another.run("ranks = Ranks(1, 'gloo')")
    processes = started(another.pid)
    assert len(processes) >= 2
    another.end("shutdown")
    assert_gone(processes, another.folder)


def busy() -> None:
    """In compiled code, and no other thread of the process gets to run."""
    collections.deque(itertools.repeat(0), maxlen=0)


COMPILED = f"""
import collections, itertools
from course_kit.ranks import Ranks
{inspect.getsource(busy)}
ranks = Ranks(1, "gloo")
print("ready", flush=True)
ranks(busy)
"""


def test_a_rank_that_is_busy_in_compiled_code_ends_with_a_killed_kernel_too(tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    kernel = subprocess.Popen([sys.executable, "-c", COMPILED], stdout=subprocess.PIPE, text=True, env=environment)
    assert kernel.stdout.readline() == "ready\n"
    time.sleep(0.5)
    processes = started(kernel.pid)
    kernel.kill()
    kernel.communicate()
    assert_gone(processes, tmp_path)


# --- GPUs


@pytest.mark.gpu
def test_ranks_on_gpus_have_one_each():
    n = min(2, torch.cuda.device_count())
    with Ranks(n, timeout_s=10) as on_gpus:
        assert on_gpus.backend == "nccl"
        assert on_gpus(torch.cuda.current_device) == list(range(n))
        on_gpus.timeout_s = 1
        with pytest.raises(TimeoutError):
            on_gpus(time.sleep, 600)
        on_gpus.timeout_s = 30
        assert on_gpus(lambda: dist.get_world_size()) == [n] * n


def meshes(count: int) -> int:
    """On a rank: the threads of its process, before it makes so many meshes of two by two ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    before = len(os.listdir("/proc/self/task"))
    for number in range(count):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(f"a{number}", f"b{number}"))
        dist.all_reduce(torch.ones(1), group=mesh[f"b{number}"].get_group())
    return before


def test_an_interface_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    monkeypatch.delattr(dist.ProcessGroupGloo, "shared_devices", raising=False)
    with pytest.raises(ValueError, match="^GLOO_SOCKET_IFNAME names nowhere0, and this machine has .*lo"):
        prepare_backend("gloo")


def test_nccl_has_streams_of_high_priority_unless_somebody_says_otherwise(monkeypatch):
    """What is set before stays; gloo needs nothing."""
    name = "TORCH_NCCL_HIGH_PRIORITY"
    monkeypatch.setenv(name, "0")
    prepare_backend("nccl")
    assert os.environ[name] == "0"
    monkeypatch.delenv(name)
    prepare_backend("gloo")
    assert name not in os.environ
    prepare_backend("nccl")
    assert os.environ[name] == "1"


@pytest.mark.parametrize("join", [rank_entry.join_group, sweep_rank.join_group], ids=["launcher", "sweep"])
def test_programs_give_nccl_its_device_and_their_priority_before_they_join(join, monkeypatch):
    """A group that knows its device is split into others; one that does not makes each communicator anew."""
    joined = []
    monkeypatch.delenv("TORCH_NCCL_HIGH_PRIORITY", raising=False)
    for name, value in [("RANK", 9), ("LOCAL_RANK", 1), ("WORLD_SIZE", 16), ("MASTER_ADDR", ""), ("MASTER_PORT", 1)]:
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: joined.append(index))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(rank_entry, "round_store", lambda *_: None)

    def init_process_group(backend, device_id=None, **_):
        joined.extend([backend, device_id, os.environ.get("TORCH_NCCL_HIGH_PRIORITY")])

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    join()
    assert joined == [1, "nccl", torch.device("cuda", 1), "1"]


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads as Linux does")
def test_the_threads_of_meshes_do_not_pile_up(ranks):
    """A DeviceMesh is a reference cycle; left to itself it keeps its groups, and their threads, for many calls."""
    first = ranks(meshes, 6)
    for _ in range(3):
        assert ranks(meshes, 6) == first
