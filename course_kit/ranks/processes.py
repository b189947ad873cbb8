"""The processes behind `Ranks`: ipyparallel's controller, one engine per rank, and a folder that they share."""

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from course_kit.ranks import worker

START_S = 120.0  # at most, for all processes to start
PING_S = 2.0  # until an engine is pinged again
JOIN_S = 30.0  # at most, to form a process group
ANSWER_S = 4.0  # at most, for the ranks to report their stacks: on a busy machine their threads wait for their turn
STATUS_S = 2.0  # at most, until the parent of a dead process reports its exit status
DEATHS = {
    signal.SIGKILL: "killed, as by a machine that is out of memory",
    signal.SIGABRT: "compiled code gave up, as gloo does where a message does not fit the tensor it should go into",
}
NO_ANSWER = [["", 0, "no answer: it has just ended, or is busy in compiled code"]]

PORTS = 24  # at least as many as the controller takes


def free_ports(n: int) -> tuple[int, socket.socket]:
    """Return the first of n free consecutive ports, and a socket bound to the port before them.

    Keep the socket open until the controller has bound the ports, a while after it starts: another kernel that looks
    for ports then skips this row. The system gives none of these ports to a connection (Linux: from 32768
    on, macOS: from 49152). Raises RuntimeError if there are none.
    """
    rows = (30_000 - 20_000) // (n + 1)
    for row in range(os.getpid(), os.getpid() + rows):
        port_before = 20_000 + row % rows * (n + 1)
        with contextlib.suppress(OSError), contextlib.ExitStack() as tried:
            socket_before = tried.enter_context(socket.socket())
            for port in range(port_before, port_before + n + 1):
                (socket_before if port == port_before else tried.enter_context(socket.socket())).bind(
                    ("127.0.0.1", port)
                )
            return port_before + 1, socket_before.dup()
    raise RuntimeError(f"no {n} free ports in a row between 20000 and 30000")


class Processes:
    """ipyparallel's controller and `n` engines, and the folder through which the kernel sends them requests."""

    def __init__(self, n: int, backend: str):
        import ipyparallel
        from ipyparallel.cluster.launcher import LocalEngineLauncher
        from traitlets.config import Config

        class AllEngines(LocalEngineLauncher):
            """One process that forks the engines."""

            def start(self, n: int):
                return super().start()

        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        path = [str(entry) for entry in sys.path]
        started = f"import sys; sys.path[:] = {path!r}; from course_kit.ranks.worker import main; main()"
        command = [sys.executable, "-c", started, str(os.getpid()), str(self.folder), backend]
        config = Config()
        config.ControllerLauncher.controller_cmd = [*command, "1", "ipyparallel.controller"]
        config.EngineLauncher.engine_cmd = [*command, str(n), "ipyparallel.engine", "--IPEngine.enable_nanny=False"]
        # An engine counts as registered after a heartbeat, which comes every 3 s by default.
        beats = ["--IPController.use_threads=True", "--HeartMonitor.period=500"]
        beats += ["--HeartMonitor.max_heartmonitor_misses=1000"]
        first, mark = free_ports(PORTS)
        ports = [f"--IPController.ports={first}-{first + PORTS - 1}"]
        cluster = ipyparallel.Cluster(
            n=n, config=config, profile_dir=str(self.folder / "profile"), cluster_file="",
            log_level=logging.CRITICAL, engine_launcher_class=AllEngines,
            controller_args=beats + ports, shutdown_atexit=False,
        )  # fmt: skip
        self.clients: list = []
        self.close = weakref.finalize(self, end_processes, os.getpid(), cluster, self.clients, self.folder)
        try:
            self._connect(cluster, n, backend)
        except BaseException:
            self.close()
            raise
        finally:
            mark.close()

    def _connect(self, cluster, n: int, backend: str) -> None:
        cluster.start_cluster_sync()
        client = cluster.connect_client_sync(timeout=START_S)
        self.clients.append(client)
        client.wait_for_engines(n, timeout=START_S, interactive=False)
        self.views = [client[engine] for engine in sorted(client.ids)]
        for view in self.views:
            wait_until_connected(view)
        started = [
            view.apply_async(worker.start, rank, n, backend, str(self.folder)) for rank, view in enumerate(self.views)
        ]
        self.pids = [result.get(START_S) for result in started]
        self.outputs = [Output(self.folder / f"rank-{rank}.out", rank) for rank in range(n)]

    def apply(self, function: Callable, *args) -> list:
        """Start `function(*args)` on every rank; return ipyparallel's AsyncResults by rank."""
        return [view.apply_async(function, *args) for view in self.views]

    def join(self, number: int) -> bool:
        """Return True if all ranks could join a new default group."""
        results = self.apply(worker.join, number)
        deadline = time.monotonic() + JOIN_S
        return all(result.wait(max(0, deadline - time.monotonic())) and result.successful() for result in results)

    def alive(self, rank: int) -> bool:
        import psutil

        try:
            return psutil.Process(self.pids[rank]).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def death(self, rank: int) -> str:
        """Return the cause of death of a rank's process."""
        file, deadline = self.folder / f"{self.pids[rank]}.status", time.monotonic() + STATUS_S
        while not (text := file.read_text() if file.exists() else "").endswith("\n"):
            if time.monotonic() > deadline:
                return "cause unknown"
            time.sleep(0.02)
        if int(text) >= 0:
            return f"it ended itself, with exit status {int(text)}"
        number = signal.Signals(-int(text))
        return f"{number.name}, {DEATHS.get(number, 'a crash in compiled code')}"

    def ask(self, what: str) -> None:
        """Leave a request for the threads that watch over the ranks."""
        (self.folder / what).touch()

    def where(self, call: int, ranks: list[int]) -> dict[int, list]:
        """Return the stack of each of `ranks`, and the transfers that it has not waited for, by rank."""
        self.ask(f"where-{call}")
        answers = {rank: self.folder / f"where-{call}-rank-{rank}" for rank in ranks}
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline and not all(answer.exists() for answer in answers.values()):
            time.sleep(0.02)
        return {
            rank: json.loads(answer.read_text()) if answer.exists() else [NO_ANSWER, []]
            for rank, answer in answers.items()
        }

    def show_output(self, rest: bool = False) -> None:
        """Print the ranks' new output: complete lines, and with `rest` also an unfinished line."""
        for output in self.outputs:
            output.show(rest)


CR = "\r"


class Output:
    """The output of one rank."""

    def __init__(self, file: Path, rank: int):
        self.file, self.rank, self.at = file, rank, 0
        file.touch()

    def show(self, rest: bool) -> None:
        with open(self.file, "rb") as stream:
            stream.seek(self.at)
            new = stream.read()
        new = new if rest else new[: new.rfind(b"\n") + 1]
        self.at += len(new)
        for line in new.decode(errors="replace").removesuffix("\n").split("\n") if new else []:
            print(f"[rank {self.rank}] {line.rstrip(CR).rsplit(CR)[-1]}")  # of a progress bar, its last state


def wait_until_connected(engine) -> None:
    """Ping an engine until it answers, for at most START_S. An engine registers over one connection and takes calls
    over another: a call that comes before the second connection exists is dropped silently.
    """
    deadline = time.monotonic() + START_S
    while not engine.apply_async(os.getpid).wait(PING_S) and time.monotonic() < deadline:
        pass


def end_processes(kernel: int, cluster, clients: list, folder: Path) -> None:
    """Kill the controller and the engines with their child processes: two sessions."""
    if os.getpid() != kernel:  # a forked child of the kernel
        return
    launchers = [cluster.controller, *cluster.engines.values()]
    launchers = [launcher for launcher in launchers if launcher and launcher.state == "running"]
    for launcher in launchers:
        with contextlib.suppress(OSError):  # gone
            os.killpg(launcher.process.pid, signal.SIGKILL)
    for launcher in launchers:
        with contextlib.suppress(Exception):
            launcher.process.wait(1)
    for client in clients:
        client.close(linger=0)
    shutil.rmtree(folder, ignore_errors=True)
