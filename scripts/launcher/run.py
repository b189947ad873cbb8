"""Run torchrun and report how it ended: one report of the first failure, and no process left.

torchrun (torch.distributed.run) runs in this process: a failed rank is reported as an exception rather than as
text. If the ranks share a few cores, they are forked from one process that has imported PyTorch: on two cores, four
ranks that each import it take 12 s.
"""

import argparse
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import tempfile
from multiprocessing import forkserver, process
from pathlib import Path

from launcher.first_error import cause, deaths
from launcher.other_nodes import OtherNodes
from launcher.reports import read_reports
from launcher.torchrun import gpu_count

# What every rank needs, and what each would import by itself: an optimizer's first step wants torch._dynamo.
IMPORTED_ONCE = ["torch", "torch._dynamo", "torch.distributed.checkpoint"]


def say(text: str) -> None:
    """Print a line of the launcher's own, distinct from the ranks' output."""
    print(f"launch: {text}", file=sys.stderr, flush=True)


def say_at_last(text: str) -> None:
    """Print a line after the ranks' output, which may have ended within a progress bar on a terminal."""
    if sys.stderr.isatty():
        print(file=sys.stderr)
    say(text)


def stopped(number: signal.Signals) -> int:
    """Report that a signal has ended the launch, and return the shell's exit status for it."""
    say_at_last("stopped by Ctrl-C" if number == signal.SIGINT else f"stopped by {number.name}")
    return 128 + number


def run(command: list[str]) -> int:
    """Run torchrun with this command line and return the exit status. No rank, and no child of one, is left then."""
    quieten_torchrun()
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "5")  # seconds that a rank has to end after a signal
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT
    handlers = {number: signal.getsignal(number) for number in numbers}
    with tempfile.TemporaryDirectory(prefix="launch-") as folder:
        try:
            return watched(command, Path(folder))
        finally:
            for number in handlers:
                signal.signal(number, signal.SIG_IGN)
            end_ranks(Path(folder))
            end_server()
            for number, handler in handlers.items():
                signal.signal(number, handler)


def watched(command: list[str], reports: Path) -> int:
    """Run torchrun with the ranks' reports in `reports`, and report errors."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args
    from torch.distributed.run import run as torchrun

    args = parse_args(command)
    args.training_script_args = ["--launcher", str(os.getpid()), "--reports", str(reports), *args.training_script_args]
    if not args.log_dir and args.redirects == args.tee == "0":  # else the user wants to read what is there
        args.log_dir = str(reports)
    # Ctrl-C ends the ranks by SIGTERM: at SIGINT, what they have started would print tracebacks. Under nohup SIGHUP is
    # ignored, and stays so: the end of the terminal does not end the run.
    left = {"SIGINT"} | ({"SIGHUP"} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set())
    args.signals_to_handle = ",".join(name for name in args.signals_to_handle.split(",") if name.strip() not in left)
    interrupted = SignalException("Ctrl-C", signal.SIGTERM)
    if args.nproc_per_node != "1" and can_fork(reports):
        fork_ranks(args, reports)
    tell_of_deaths(reports)
    signal.signal(signal.SIGINT, raising(interrupted))
    for number in (signal.SIGTERM, signal.SIGHUP):  # until torchrun sets its own handlers, when the ranks start
        if number.name not in left:
            signal.signal(number, raising(SignalException(number.name, number)))
    try:
        torchrun(args)
        return 0
    except ChildFailedError as error:
        failures = read_reports(reports)
        say_at_last(cause(error.failures, failures))
        tell_other_nodes(reports, deaths(error.failures, failures))
        return 1
    except SignalException as error:
        return stopped(signal.SIGINT if error is interrupted else error.sigval)
    except Exception as error:  # the rendezvous: no other node joined, or its host is gone
        failures = read_reports(reports)
        say_at_last(
            cause({}, failures) if failures else f"torchrun: {type(error).__name__}: {str(error).splitlines()[0]}"
        )
        return 1


def can_fork(folder: Path) -> bool:
    """Return whether ranks may be forks: neither a GPU's driver nor Apple's frameworks survive a fork. The path of the
    server's socket must fit too: at most 108 characters, 18 of them its name.
    """
    return sys.platform == "linux" and not gpu_count() and len(str(folder)) < 90


def fork_ranks(args: argparse.Namespace, folder: Path) -> None:
    """Have torchrun run the script in forks of a server that has imported what all ranks need."""
    from torch.distributed.elastic.multiprocessing.api import MultiprocessContext

    def poll(context, of_torch=MultiprocessContext._poll):
        """torchrun waits for a fork's return value; a program that ended itself by os._exit(0) returns none."""
        for rank, each in enumerate(context._pc.processes):
            if each.exitcode == 0:
                context._return_values.setdefault(rank, None)
        return of_torch(context)

    MultiprocessContext._poll = poll
    args.run_path, args.start_method = True, "forkserver"
    forkserver.set_forkserver_preload(IMPORTED_ONCE)
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")  # it frees what ranks leave: not for the user
    process.current_process()._config["tempdir"] = str(folder)  # a folder also removed if the launcher is killed
    vars(sys.modules["__main__"]).pop("__file__", None)  # or each fork would first run the launcher's script


def tell_of_deaths(reports: Path) -> None:
    """Make torchrun's agent report a killed rank, which reports nothing itself, before it restarts all ranks."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    def monitor(agent, group, of_torch=LocalElasticAgent._monitor_workers):
        result, left, most = of_torch(agent, group), agent._remaining_restarts, group.spec.max_restarts
        if left and (died := deaths(result.failures, read_reports(reports))):
            say_at_last(f"rank {died[0][0]}: {died[0][1]}; restart {most - left + 1} of {most}")
        return result

    LocalElasticAgent._monitor_workers = monitor


def end_server() -> None:
    """End the fork server, whatever it is doing."""
    if forkserver._forkserver._forkserver_pid:
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
        forkserver._forkserver._stop()


def raising(error: Exception):
    """Return a signal handler that raises `error`."""

    def handler(number, frame):
        raise error

    return handler


def quieten_torchrun() -> None:
    """Silence torchrun's log, which repeats the report at length, unless LOGLEVEL is set."""
    if "LOGLEVEL" not in os.environ:
        for name in ("torch.distributed", "torch.multiprocessing"):
            log = logging.getLogger(name)
            log.handlers, log.propagate = [logging.NullHandler()], False


def end_ranks(reports: Path) -> None:
    """Kill what is left of each rank's process group: a killed rank leaves its children behind."""
    for mark in rank_marks(reports):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(mark["process"], signal.SIGKILL)


def tell_other_nodes(reports: Path, died: list[tuple[int, str]]) -> None:
    """Tell the other nodes of the error of a rank that could not do so itself."""
    for mark in rank_marks(reports)[:1]:
        others = OtherNodes(mark["job"])
        if died and not others.alone:
            others.tell(died[0][0], socket.gethostname(), died[0][1])


def rank_marks(reports: Path) -> list[dict]:
    """Return the start records of the ranks that did not finish."""
    marks = []
    for file in reports.glob("*.rank"):
        with contextlib.suppress(ValueError):  # killed while it wrote
            marks.append(json.loads(file.read_text(encoding="utf-8")))
    return marks
