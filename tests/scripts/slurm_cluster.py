"""A real Slurm of two nodes and a spare one on this machine, for tests: munged, slurmctld and three slurmd, with files
and ports of their own, and without the system's /etc/slurm, cgroups or systemd.

    with Cluster() as cluster:
        cluster.run("sbatch", "--wrap", "hostname")

The nodes are called 127.0.0.1 to 127.0.0.3, names that every machine can resolve; the third has jobs where the others
are not enough. Each has more cores than there are, and two GPUs, which are device files that nobody opens. All of it
runs below one process of `course_kit.sweep.enclosed`: when that ends, or the process of the tests does, nothing is
left, whatever a job has started.
"""

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from course_kit.sweep.enclosed import ROOT

PATIENCE_S = 300  # a deadline for what hangs
NODES = "127.0.0.1", "127.0.0.2", "127.0.0.3"
PROGRAMS = "munged munge slurmctld slurmd sbatch srun squeue scontrol scancel".split()
JOBS = 50  # at most, in the life of a cluster
CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
KillWait={patience_s}
MessageTimeout=60
SchedulerParameters=batch_sched_delay=0
GresTypes=gpu
ReturnToService=2
FirstJobId={first_job}
NodeName=DEFAULT CPUs=64 Gres=gpu:2
NodeName=127.0.0.1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]}
NodeName=127.0.0.2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]}
NodeName=127.0.0.3 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3]} Weight=2
PartitionName=main Nodes=ALL Default=YES
"""
GPUS = "NodeName=127.0.0.[1-3] Name=gpu File={folder}/gpu[0-1]\n"
# A slurmd that has ended starts again, unless there is a file that says that its node is dead.
DAEMONS = """\
cd {folder} || exit 1
munged --foreground --key-file={folder}/key --socket={folder}/munge.socket --pid-file={folder}/munged.pid \\
    --log-file={folder}/munged.log --seed-file={folder}/seed &
until munge --no-input --socket={folder}/munge.socket >/dev/null 2>&1; do sleep 0.1; done
slurmctld -D -f {folder}/slurm.conf &
for node in 127.0.0.1 127.0.0.2 127.0.0.3; do
    while :; do
        [ -e "{folder}/$node.dead" ] || slurmd -D -f {folder}/slurm.conf -N "$node"
        sleep 0.2
    done &
done
wait
"""


def why_not() -> str:
    """Why there can be no such Slurm here; "" where there can."""
    if missing := [name for name in PROGRAMS if not shutil.which(name)]:
        return f"no {missing[0]} here: apt-get install slurmctld slurmd slurm-client munge"
    if os.geteuid():
        return "Slurm's daemons are started as root, which this is not"
    with tempfile.TemporaryDirectory() as folder:
        try:
            os.mknod(f"{folder}/gpu", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        except OSError as error:
            return f"this root may not make device files: {error.strerror}"
    return ""


def wait_for(found: Callable[[], object], what: Callable[[], str]) -> object:
    """What `found` gives, as soon as that is something."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := found()):
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)
    return value


def free_ports(count: int) -> list[int]:
    """So many ports at which nobody listens."""
    with contextlib.ExitStack() as held:
        return [held.enter_context(socket.create_server(("", 0))).getsockname()[1] for _ in range(count)]


def first_job() -> int:
    """A number for the first job. A job's rendezvous is at the port of 20000 and its number: those of JOBS are free."""
    for job in range(1 + os.getpid() % 9000, 10000 - JOBS, JOBS):
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for number in range(job, job + JOBS):
                held.enter_context(socket.create_server(("", 20000 + number)))
            return job
    raise RuntimeError("no free ports")


class Cluster:
    """The daemons and what their jobs run. `folder`: of all their files; `environment`: for programs that use them."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.folder.chmod(0o755)  # munged wants its socket to be in reach of everyone
        about = {"folder": self.folder, "host": socket.gethostname().split(".")[0], "patience_s": PATIENCE_S}
        about |= {"ports": free_ports(4), "first_job": first_job()}
        files = {"slurm.conf": CONFIGURATION, "gres.conf": GPUS, "daemons.sh": DAEMONS}
        for name, text in files.items():
            (self.folder / name).write_text(text.format(**about))
        for name in ("gpu0", "gpu1"):
            os.mknod(self.folder / name, stat.S_IFCHR | 0o600, os.makedev(1, 3))  # /dev/null's
        (self.folder / "key").write_bytes(os.urandom(128))
        (self.folder / "key").chmod(0o600)
        for name in ("state", "tmp", *NODES):
            (self.folder / name).mkdir()
        # An outer job's settings would be taken for those of ours; and the path of a socket is short.
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))}
        self.environment = kept | {"SLURM_CONF": f"{self.folder}/slurm.conf", "TMPDIR": f"{self.folder}/tmp"}
        about = [str(os.getpid()), str(10 * PATIENCE_S), str(self.folder / "daemons.log")]
        self.keeper = psutil.Popen(
            [sys.executable, "-m", "course_kit.sweep.enclosed", *about, "bash", str(self.folder / "daemons.sh")],
            cwd=ROOT, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> "Cluster":
        try:
            wait_for(self.all_idle, self.logs)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """End everything, and leave no file."""
        self.keeper.terminate()
        try:
            self.keeper.wait(timeout=PATIENCE_S)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def logs(self) -> str:
        """The ends of what the daemons have said."""
        found = {file.name: file.read_text(errors="replace")[-2000:] for file in self.folder.glob("*.log")}
        return "\n".join(f"--- {name}\n{text}" for name, text in found.items())

    def run(self, *command: str) -> str:
        """What one of Slurm's programs prints."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}\n{self.logs()}"
        return done.stdout

    def all_idle(self) -> bool:
        """Whether all nodes are there, and nothing runs on them."""
        assert "fatal: " not in (logs := self.logs()), logs
        command = ["sinfo", "--noheader", "--Node", "--format=%N %T"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=PATIENCE_S)
        return done.stdout.splitlines() == [f"{node} idle" for node in NODES]

    def state(self, job: str) -> str:
        """A job's state, such as RUNNING or COMPLETED."""
        return self.run("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}").strip()

    def when(self, job: str, *states: str) -> str:
        """Wait until a job is in one of these states; which one."""
        return wait_for(lambda: (now := self.state(job)) in states and now, lambda: f"{self.state(job)}\n{self.logs()}")

    def of_jobs(self, node: str | None = None) -> list[psutil.Process]:
        """The processes of all jobs, or of those on a node: Slurm's own for them too."""
        found = set()
        for process in self.keeper.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                about = process.environ()
                if "SLURM_JOB_ID" in about and node in (None, about.get("SLURMD_NODENAME")):
                    found.add(process)
                    if (parent := process.parent()) and parent.name() == "slurmstepd":
                        found.add(parent)
                elif node is None and process.name() == "slurmstepd":
                    found.add(process)
        return [*found]

    def none_left(self) -> None:
        """Wait until no process of a job is there."""
        wait_for(lambda: not self.of_jobs(), lambda: f"left: {self.of_jobs()}")

    def kill_node(self, node: str) -> None:
        """As if its power were cut: slurmd and all processes of jobs there are gone, without a word."""
        (self.folder / f"{node}.dead").touch()
        victims = self.of_jobs(node)
        for process in self.keeper.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.name() == "slurmd" and process.cmdline()[-1:] == [node]:
                    victims.append(process)
        for number in (signal.SIGSTOP, signal.SIGKILL):  # none of them sees that another has gone
            for process in victims:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
        # Slurm would find it out by itself, after its SlurmdTimeout.
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=killed")

    def tidy(self) -> None:
        """After a test, which may have failed: no job, and all nodes."""
        self.run("scancel", "--partition=main")
        self.none_left()
        for node in NODES:
            (self.folder / f"{node}.dead").unlink(missing_ok=True)
        wait_for(self.all_idle, self.logs)
