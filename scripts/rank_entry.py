"""The program of each rank: `main` of a module of the library, inside a process group. Errors are recorded.

    python -m torch.distributed.run … scripts/rank_entry.py [options] MODULE [options of the program]

The launcher starts it through torchrun, on the CPU in forks of a process that has imported PyTorch; the command printed
by `--dry-run` starts it without the launcher. In order:

1. Watch the launcher, so that no rank outlives it: a SIGKILL of torchrun leaves its ranks alive.
2. Join the default process group: NCCL (or XCCL) on GPU number LOCAL_RANK, gloo on the CPU. A single rank
   has one too, so `main` and every `group=None` may rely on it; `main` does not initialize another.
3. Lay the learner's modules over the reference's, import MODULE and call `main(options)`.
4. End by destroying the group, flushing and `os._exit`: a gloo rank may abort while the interpreter shuts down. A fork
   first waits until torchrun reports that all ranks are done.

An error goes to torchrun's error file and to the launcher's folder, which reports the first rank to fail.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import json
import multiprocessing.util
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

SCRIPTS = str(Path(__file__).resolve().parent)
if sys.flags.safe_path and SCRIPTS not in sys.path:  # PYTHONSAFEPATH: the script's folder is not on the path
    sys.path.insert(0, SCRIPTS)

from launcher.copies import fits  # noqa: E402
from launcher.other_nodes import OtherNodes, job_here  # noqa: E402
from launcher.reports import describe, write_report  # noqa: E402
from launcher.round_store import round_store  # noqa: E402

ROOT = Path(SCRIPTS).parent
BACKENDS = {"cuda": "nccl", "xpu": "xccl"}
GRACE_S = 5.0  # how long a rank that only lost its peer waits for the peer to say why


class LearnersModules:
    """Import finder: modules in the overlay that fit the reference's, except `reference_modules`; all others are the
    reference's. A name that is a package in the reference must be one in the overlay: overlays older than the
    packages have other modules.
    """

    def __init__(self, overlay: Path, reference: Path, reference_modules: list[str]):
        self.overlay, self.reference, self.not_taken = overlay, reference, set(reference_modules)

    def find_spec(self, name, path=None, target=None):
        first, *parts = name.split(".")
        names = {".".join(parts), ".".join([*parts, "__init__"])}
        if first != self.reference.name or not parts or names & self.not_taken:
            return None
        overlaid, theirs = (folder.joinpath(*parts) for folder in (self.overlay, self.reference))
        if theirs.is_dir():
            file, original, search_paths = (
                overlaid / "__init__.py",
                theirs / "__init__.py",
                [str(overlaid), str(theirs)],
            )
        else:
            file, original, search_paths = overlaid.with_suffix(".py"), theirs.with_suffix(".py"), None
        if not file.is_file() or not fits(file, original):
            return None
        return importlib.util.spec_from_file_location(name, file, submodule_search_locations=search_paths)


def open_library(overlay: Path | None, reference_modules: list[str]) -> None:
    """Make this tree's `course_lib` importable, the modules of `overlay` first, except `reference_modules`."""
    sys.path.insert(0, str(ROOT))
    importlib.import_module("course_lib")
    if overlay:
        sys.meta_path.insert(0, LearnersModules(overlay, ROOT / "course_lib", reference_modules))


def join_group() -> None:
    """Initialize the default process group on this rank's device."""
    import torch

    from course_kit.ranks.connections import prepare_backend

    rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    accelerator, backend, device = torch.accelerator.current_accelerator(check_available=True), "gloo", None
    if accelerator is not None and accelerator.type in BACKENDS:
        backend = BACKENDS[accelerator.type]
        torch.accelerator.set_device_index(local_rank)
        # On a single rank NCCL, and the GPU memory it takes, can wait for the first collective.
        device = torch.device(accelerator.type, local_rank) if world_size > 1 else None
    elif hasattr(os, "sched_setscheduler"):  # the ranks may outnumber the cores: as in course_kit/ranks/worker.py
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    prepare_backend(backend)
    opens_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = round_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), rank, world_size, opens_store)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=device)


def run(args: argparse.Namespace) -> None:
    """Import the module and run its `main`, between joining and leaving the process group."""
    gc.disable()  # imports create many objects and free few
    open_library(args.overlay, args.reference_modules)
    import torch.distributed

    watch_other_nodes(args.reports)
    join_group()
    program = importlib.import_module(f"course_lib.{args.module}")
    gc.freeze()  # a collection, which the other ranks wait for, then visits only the program's objects, not PyTorch's
    gc.enable()
    sys.argv = [program.__file__, *args.options]
    try:
        program.main(args.options)
    except SystemExit as stop:
        if stop.code:
            raise
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def report_error(error: BaseException, reports: Path | None) -> None:
    """Record the error, tell the other nodes, and print it if no launcher will."""
    report, others = describe(error), OtherNodes(job_here())
    write_report(report, reports)
    attempt, last = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    last_attempt = attempt == last
    if reports is None and report["frames"]:
        traceback.print_exception(error)
    elif reports is None:
        print(report["headline"], file=sys.stderr)
    elif not last_attempt and not report["lost_peer"]:
        restart = f"restart {int(attempt) + 1} of {last}"
        print(f"launch: rank {report['rank']}: {report['headline']}; {restart}", file=sys.stderr)
    if report["lost_peer"]:
        time.sleep(GRACE_S)
    elif last_attempt and not others.alone:
        others.tell(report["rank"], report["host"], report["headline"])
    if last_attempt and not others.alone:  # before a restart no one reads it, and the store may be gone with its node
        write_report(report | {"first": others.first()}, reports)


def watch_other_nodes(reports: Path | None) -> None:
    """End this rank when one on another node has failed, unless torchrun is to restart them all."""
    others = OtherNodes(job_here())
    last_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT") == os.environ.get("TORCHELASTIC_MAX_RESTARTS")

    def watch():
        first = others.wait(interval_s=0.5)
        time.sleep(0.5)  # this rank may be about to report an error of its own
        if first and first["rank"] != int(os.environ["RANK"]):
            report = describe(RuntimeError("ended because a rank on another node failed"))
            write_report(report | {"lost_peer": True, "first": first}, reports)
            end_group(signal.SIGKILL)

    if last_attempt and not others.alone:
        threading.Thread(target=watch, daemon=True).start()


def name_process(program: str) -> None:
    """Let top and ps show which rank this process is: forks share the command line of the server that forked them."""
    with contextlib.suppress(OSError, IndexError, ValueError):  # not Linux
        Path("/proc/self/comm").write_text(f"rank {os.environ['RANK']}")
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, addresses in this process (man 5 proc)
        title = f"rank {os.environ['RANK']} (local rank {os.environ['LOCAL_RANK']}): {program}".encode()
        if 0 < start < end:
            ctypes.memmove(start, title[: end - start - 1].ljust(end - start, b"\0"), end - start)


def end_group(how: signal.Signals) -> None:
    """Signal this rank's process group, the rank and its children: torchrun makes each rank the head of one."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, how)
    elif how == signal.SIGKILL:
        os._exit(1)


def watch_launcher(launcher: int, reports: Path | None) -> None:
    """Write this rank's process id for the launcher, and end the rank within a second of the launcher's death."""
    parent = multiprocessing.parent_process()  # of a fork: the launcher
    if reports:
        (reports / f"{os.environ['LOCAL_RANK']}.json").unlink(missing_ok=True)  # of an attempt before this one
        mark = json.dumps({"process": os.getpid(), "job": job_here()})
        (reports / f"{os.environ['LOCAL_RANK']}.rank").write_text(mark, encoding="utf-8")

    def alive() -> bool:
        return parent.is_alive() if parent else os.getppid() == launcher

    def watch():
        while alive():
            time.sleep(0.5)
        if reports:
            shutil.rmtree(reports, ignore_errors=True)
        end_group(signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def finish(status: int, reports: Path | None) -> None:
    """End this rank and its children without the interpreter's own shutdown."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_group(signal.SIGTERM)
    if reports:
        (reports / f"{os.environ['LOCAL_RANK']}.rank").unlink(missing_ok=True)
    if status or multiprocessing.parent_process() is None:
        os._exit(status)
    signal.signal(signal.SIGTERM, before)
    multiprocessing.util.Finalize(None, os._exit, args=(0,), exitpriority=0)  # of a fork, once torchrun lets it go


def main() -> None:
    """Parse the command line and run a rank from start to end."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--overlay", type=Path, help="folder whose modules lie over course_lib: the learner's own")
    parser.add_argument("--reference-modules", type=lambda names: names.split(","), default=[], help="save for these")
    parser.add_argument("--launcher", type=int, default=os.getppid(), help="process number of the launcher")
    parser.add_argument("--reports", type=Path, help="the launcher's folder for this launch")
    parser.add_argument("module")
    parser.add_argument("options", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    sys.path.pop(0)  # the folder of scripts
    for stream in (sys.stdout, sys.stderr):  # whole lines: with torchrun's python -u the ranks' lines mix
        stream.reconfigure(line_buffering=True, write_through=False)
    if multiprocessing.parent_process():
        os.setsid()  # as torchrun does for a program
        # The end of the server that forks sends SIGINT: the watch is to end this rank, with what it has started.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher alone answers Ctrl-C
    faulthandler.enable(all_threads=False)
    name_process(" ".join([args.module, *args.options]))
    watch_launcher(args.launcher, args.reports)
    try:
        run(args)
    except BaseException as error:
        report_error(error, args.reports)
        finish(1, args.reports)
    finish(0, args.reports)


if __name__ == "__main__":
    main()
