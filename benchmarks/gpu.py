"""All jobs that need a GPU, by one command: their results and their speed.

    python benchmarks/gpu.py --out DIR --budget 540     # or `make gpu`; finished jobs are skipped: run it again
    python benchmarks/gpu.py --plan                     # the jobs and their estimated seconds; needs no GPU
    python benchmarks/gpu.py --out DIR --only linear    # the jobs with this in their names, done or not
    python benchmarks/gpu.py --out DIR --record         # benchmarks/results/*_<gpu>.json from the measurements
    python benchmarks/gpu.py --out DIR --device cpu     # all jobs at tiny sizes, interpreted: times mean nothing

It runs from a bare checkout, with torch, triton and numpy alone; pytest, ncu, compute-sanitizer, Liger-Kernel and
torchao are used if they are installed. The jobs and their order are in gpu_jobs.py, the measurement in kernel_runs.py.

Jobs run in worker processes, with a new process after each job that failed: an illegal access, a crash, a hang or a
wrong result affects only its own job. Timed jobs have the GPU to themselves; the others run concurrently. Before the
first timed job, everything they compile is compiled concurrently (`ready: `), and cached on disk by Triton and PyTorch.
DIR/results.jsonl gets a line for each event as it happens:

    {"job": name, "begin": date}    {"job": name, "row": {...}}    {"job": name, "outcome": "passed", "seconds": 12.3}

outcome: passed; skipped (a tool is missing); failed (an error, or a wrong result), crashed, timed out, with `error`.
DIR/log.txt has the output of the jobs.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import datetime
import importlib
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [path for path in (str(HERE.parent), str(HERE)) if path not in sys.path]
STARTED = time.monotonic()
START_S = 120  # limit for a process to begin its first job


@dataclass(frozen=True)
class Job:
    """A unit of work. Its rows are written as they are yielded; it fails by raising."""

    name: str
    run: Callable[[], Iterable[dict]]
    seconds: float  # on an H200, an estimate until `--plan --out DIR` has a measurement
    limit_s: float = 0.0  # limit after which it counts as hung; 0: three times `seconds`, plus a minute
    alone: bool = False  # in a process of its own
    beside: bool = False  # others may run concurrently: it is not timed

    @property
    def patience_s(self) -> float:
        return self.limit_s or 60 + 3 * self.seconds


class Skipped(Exception):
    """Raised by a job that needs something this machine does not have."""


def all_jobs(module: str, device: str) -> dict[str, Job]:
    """Return the jobs by name, in order."""
    jobs = list(importlib.import_module(module).jobs(device))
    assert len({job.name for job in jobs}) == len(jobs), "two jobs have one name"
    return {job.name: job for job in jobs}


def work(jobs: dict[str, Job], rows) -> None:
    """Run, in a worker process, the jobs that are named on stdin, and write their messages to the file `rows`. Exit
    after a job that failed, since no CUDA call works after an illegal access.
    """
    for name in map(str.strip, sys.stdin):
        ended = {"outcome": "passed"}
        print(json.dumps({"begin": name}), file=rows)
        try:
            for row in jobs[name].run():
                print(json.dumps({"row": row}), file=rows)
        except Skipped as reason:
            ended = {"outcome": "skipped", "error": str(reason)}
        except BaseException as error:
            traceback.print_exc()
            ended = {"outcome": "failed", "error": f"{type(error).__name__}: {str(error).strip()[:500]}"}
        print(json.dumps(ended), file=rows)
        if ended["outcome"] == "failed":
            os._exit(1)  # without CUDA's cleanup


class Worker:
    """A worker process, as seen from the main process."""

    def __init__(self, args: argparse.Namespace, log, crowded: bool):
        command = [sys.executable, str(HERE / "gpu.py"), "--work", "--jobs", args.jobs, "--device", args.device]
        few = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"} if crowded else {}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "env": os.environ | few}
        self.process = subprocess.Popen(command, **pipes, text=True, start_new_session=True)
        self.lines: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        for line in self.process.stdout:
            self.lines.put(json.loads(line))
        self.lines.put(None)

    def run(self, job: Job, patience_s: float, left_s: float, note: Callable[[dict], None]) -> dict:
        """Run a job, pass on its rows, and return its outcome. End the process if the job does not finish in time."""
        with contextlib.suppress(BrokenPipeError):
            print(job.name, file=self.process.stdin, flush=True)
        deadline = time.monotonic() + min(START_S + patience_s, left_s)
        while True:
            try:
                message = self.lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self.end()
                return {"outcome": "timed out", "error": f"it was not done after {patience_s:.0f} s"}
            if message is None:
                code = self.process.wait()
                how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
                return {"outcome": "crashed", "error": f"its process ended: {how}"}
            if "begin" in message:
                deadline = min(deadline, time.monotonic() + patience_s)
            elif "row" in message:
                note(message["row"])
            else:
                return message

    def end(self) -> None:
        """Stop the process and all its children: torchrun ends its ranks on SIGTERM, but not if it is killed."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline:
                self.process.poll()  # a finished child stays in its group until it is polled
                os.killpg(self.process.pid, 0)
                time.sleep(0.05)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def read(out: Path) -> dict[str, dict]:
    """Return the state of each job, from its last run: rows, and outcome and seconds if it has ended. A run that
    was cut off does not replace an earlier one that passed.
    """
    jobs: dict[str, dict] = {}
    passed: dict[str, dict] = {}
    file = out / "results.jsonl"
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            message = json.loads(line)
        except json.JSONDecodeError:  # the run was cut off
            continue
        name = message.pop("job")
        if "begin" in message:
            if jobs.get(name, {}).get("outcome") == "passed":
                passed[name] = jobs[name]
            jobs[name] = {"rows": []}
        elif "row" in message:
            jobs[name]["rows"].append(message["row"])
        else:
            jobs[name] |= message
    return jobs | {name: job for name, job in passed.items() if "outcome" not in jobs[name]}


def describe(row: dict) -> str:
    """Return a row as one line of text."""
    if "errors" in row and "ms" not in row:
        return "off by " + ", ".join(f"{error:.1e} ({column})" for column, error in row["errors"].items())
    if "ms" not in row:
        return ", ".join(f"{key} {value}" for key, value in row.items() if not isinstance(value, (dict, list)))[:160]
    words = [f"{row['pass']}: {row['rate']:,.0f} {row['unit']}, {row['share']:.0%} of this GPU's own"]
    words += [f"{1 / ratio:.2f} of {column}" for column, ratio in row["ours_against"].items()]
    return ", ".join([*words, f"noise {row['noise']:.1%}"])


class Run:
    """Jobs in progress, and the file for their messages."""

    def __init__(self, args: argparse.Namespace, results, log):
        self.args, self.results, self.log = args, results, log
        self.workers: set[Worker] = set()
        self.no_time: list[str] = []
        self.lock, self.stopped = threading.Lock(), False

    def note(self, job: Job, what: dict) -> None:
        with self.lock:
            print(json.dumps({"job": job.name} | what), file=self.results, flush=True)

    def lane(self, todo: collections.deque[Job], crowded: bool) -> None:
        """Run jobs from the queue one after another, concurrently with other lanes."""
        worker = None
        while not self.stopped:
            with self.lock:
                if not todo:
                    break
                job, spent = todo.popleft(), time.monotonic() - STARTED
            if job.seconds > self.args.budget - spent:
                self.no_time.append(job.name)
                continue
            if worker is None or job.alone:
                self.dismiss(worker)
                worker = Worker(self.args, self.log, crowded)
                self.workers.add(worker)
            ended = self.do(job, worker)
            if job.alone or ended["outcome"] not in ("passed", "skipped"):
                worker = self.dismiss(worker)
        self.dismiss(worker)

    def do(self, job: Job, worker: Worker) -> dict:
        """Run one job and return its outcome."""
        began, lines = time.monotonic(), []
        self.note(job, {"begin": datetime.datetime.now().isoformat(timespec="seconds")})

        def note_row(row: dict) -> None:
            lines.append(f"    {describe(row)}")
            self.note(job, {"row": row})

        ended = worker.run(job, job.patience_s, self.args.budget - (began - STARTED), note_row)
        now = time.monotonic()
        if ended["outcome"] == "timed out" and now - STARTED >= self.args.budget:
            ended = {"outcome": None, "error": "cut off, as the budget is used up"}  # it begins again next time
        if self.stopped:
            return ended
        if ended["outcome"] != "passed":
            lines.append(f"    {ended['outcome'] or 'not done'}: {ended['error']}")
        if ended["outcome"]:
            self.note(job, ended | {"seconds": round(now - began, 1)})
        lines = [f"{began - STARTED:5.0f} to {now - STARTED:3.0f} s  {job.name}", *lines, ""]
        print("\n".join(lines), end="", flush=True)
        return ended

    def dismiss(self, worker: Worker | None) -> None:
        if worker:
            worker.end()
            self.workers.discard(worker)

    def stop(self) -> None:
        """End all jobs in progress."""
        self.stopped = True
        for worker in tuple(self.workers):
            worker.end()


def run_all(args: argparse.Namespace, jobs: dict[str, Job], known: dict[str, dict]) -> dict[str, dict]:
    """Run the jobs for which there is time, and return the final state of all jobs."""
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "results.jsonl"
    if file.exists() and not file.read_text().endswith("\n"):
        file.write_text(file.read_text() + "\n")
    with file.open("a") as results, (args.out / "log.txt").open("a") as log:
        run = Run(args, results, log)
        for beside, group in itertools.groupby(jobs.values(), key=lambda job: job.beside):
            todo = collections.deque(group)
            count = min(args.processes, len(todo)) if beside else 1
            with concurrent.futures.ThreadPoolExecutor(count) as pool:
                lanes = [pool.submit(run.lane, todo, count > 1) for _ in range(count)]
                try:
                    for lane in lanes:
                        lane.result()
                finally:
                    if not all(lane.done() for lane in lanes):
                        run.stop()
    if run.no_time:
        print(f"no time was left for {len(run.no_time)} jobs: run it again to continue with {run.no_time[0]!r}")
    return known | read(args.out)


def show_plan(jobs: dict[str, Job], known: dict[str, dict], processes: int) -> None:
    """Print the jobs, their durations, and their outcomes."""
    for job in jobs.values():
        about = known.get(job.name, {})
        seconds = about["seconds"] if about.get("outcome") == "passed" else job.seconds
        print(f"{seconds:6.0f} s  {job.name:<60} {about.get('outcome', '')}")
    todo = [job for job in jobs.values() if "outcome" not in known.get(job.name, {})]
    total, left = (
        sum(job.seconds / (processes if job.beside else 1) for job in each) for each in (jobs.values(), todo)
    )
    print(f"{left:6.0f} s  to come, of {total:.0f} s in all (estimates for an H200, {processes} jobs side by side)")


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--out", type=Path, default=Path("gpu_run"), help="a folder, where an earlier run is gone on with")
    add("--budget", type=float, default=540, help="seconds; no job is begun that would not fit")
    add("--only", metavar="NAME", help="only jobs with this in their names, whether they are done or not")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny sizes, to see that all of it runs")
    few = max(1, min(12, 3 * (os.cpu_count() or 1) // 4))
    add("--processes", type=int, default=few, help="jobs in parallel if nothing is timed (3 for 4 cores, up to 12)")
    add("--plan", action="store_true", help="say what would run, and end")
    add("--record", action="store_true", help="write results/*_<gpu>.json from what --out has, and end")
    add("--jobs", default="gpu_jobs", help=argparse.SUPPRESS)
    add("--work", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the jobs; return 1 if one did not pass."""
    args = options(argv)
    if not (args.plan or args.record or args.device == "cpu"):
        import torch

        if not torch.cuda.is_available():
            print("no GPU here, so there is nothing to run; --plan shows the jobs, --device cpu runs them tiny")
            return 0
    if args.work:
        rows = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # what is printed, from now on
        work(all_jobs(args.jobs, args.device), rows)
        return 0
    jobs = all_jobs(args.jobs, args.device)
    known = read(args.out)
    if args.record:
        for line in importlib.import_module(args.jobs).record(known):
            print(line)
        return 0
    if args.only:
        jobs = {name: job for name, job in jobs.items() if args.only in name}
        if not jobs:
            print(f"no job has {args.only!r} in its name; --plan shows them", file=sys.stderr)
            return 1
    if args.plan:
        show_plan(jobs, known, args.processes)
        return 0
    todo = jobs if args.only else {n: job for n, job in jobs.items() if "outcome" not in known.get(n, {})}
    known = run_all(args, todo, known)
    wrong = [n for n in jobs if known.get(n, {}).get("outcome", "passed") not in ("passed", "skipped")]
    print("\n".join([f"{len(wrong)} jobs did not pass:", *wrong] if wrong else ["nothing that ran is wrong"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(importlib.import_module("gpu").main())  # the module that the jobs import: its classes are theirs
