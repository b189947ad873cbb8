"""All that wants a GPU, by one command: is it right there, and how fast is it.

    python benchmarks/gpu.py --out DIR --budget 540     # or `make gpu`; what is done is skipped, so run it again
    python benchmarks/gpu.py --plan                     # the jobs and their estimated seconds; needs no GPU
    python benchmarks/gpu.py --out DIR --only linear    # the jobs with this in their names, done or not
    python benchmarks/gpu.py --out DIR --record         # benchmarks/results/*_<gpu>.json from what was measured
    python benchmarks/gpu.py --out DIR --device cpu     # all of it at tiny sizes, interpreted: times mean nothing

It runs from a bare checkout, with torch, triton and numpy alone; pytest, ncu, compute-sanitizer, Liger-Kernel and
torchao are used where they are. What is measured, and in which order, is in gpu_jobs.py; how, in kernel_runs.py.

Jobs run in processes beside this one, a new one after each job that failed: an illegal access, a crash, a hang or a
wrong result costs its own job alone. Jobs that time something have the GPU for themselves; the others run side by side.
Before the first of the timed ones, what they compile is compiled side by side too (`ready: `), and kept on disk by
Triton and PyTorch. DIR/results.jsonl gets a line as soon as there is something to say:

    {"job": name, "begin": date}    {"job": name, "row": {...}}    {"job": name, "outcome": "passed", "seconds": 12.3}

outcome: passed; skipped (a tool is not there); failed (an error, or a wrong result), crashed, timed out, with `error`.
DIR/log.txt has what the jobs print.
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
START_S = 120  # the most that a process may take until it begins its first job


@dataclass(frozen=True)
class Job:
    """Something to run. Its rows are written down as they come; it fails by raising."""

    name: str
    run: Callable[[], Iterable[dict]]
    seconds: float  # that it takes on an H200, estimated until `--plan --out DIR` knows better
    limit_s: float = 0.0  # when it counts as hung; 0: three times as long, and a minute
    alone: bool = False  # in a process of its own
    beside: bool = False  # others may run at the same time: its times do not count

    @property
    def patience_s(self) -> float:
        return self.limit_s or 60 + 3 * self.seconds


class Skipped(Exception):
    """A job needs something that is not on this machine."""


def all_jobs(module: str, device: str) -> dict[str, Job]:
    """The jobs by name, in their order."""
    found = list(importlib.import_module(module).jobs(device))
    assert len({job.name for job in found}) == len(found), "two jobs have one name"
    return {job.name: job for job in found}


def work(jobs: dict[str, Job], rows) -> None:
    """The process beside: run the jobs that are named on stdin, and say so in the file `rows`. It ends after one that
    fails, for no CUDA call works after an illegal access.
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
            os._exit(1)  # whatever CUDA has to say about it


class Worker:
    """A process beside, as this one sees it."""

    def __init__(self, chosen: argparse.Namespace, log, crowded: bool):
        command = [sys.executable, str(HERE / "gpu.py"), "--work", "--jobs", chosen.jobs, "--device", chosen.device]
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
        """Run a job, and pass on its rows; returns its outcome. The process is ended where there is no more to hope."""
        with contextlib.suppress(BrokenPipeError):
            print(job.name, file=self.process.stdin, flush=True)
        deadline = time.monotonic() + min(START_S + patience_s, left_s)
        while True:
            try:
                said = self.lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self.end()
                return {"outcome": "timed out", "error": f"it was not done after {patience_s:.0f} s"}
            if said is None:
                code = self.process.wait()
                how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
                return {"outcome": "crashed", "error": f"its process ended: {how}"}
            if "begin" in said:
                deadline = min(deadline, time.monotonic() + patience_s)
            elif "row" in said:
                note(said["row"])
            else:
                return said

    def end(self) -> None:
        """Stop it, and all that it has started: torchrun ends its ranks if it is asked to, and not if it is killed."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline:
                self.process.poll()  # a child that has ended is in its group until it is asked for
                os.killpg(self.process.pid, 0)
                time.sleep(0.05)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def read(out: Path) -> dict[str, dict]:
    """What is known of each job, from its last run: rows, and outcome and seconds where it has ended. A run that was
    cut off does not count where an earlier one has passed.
    """
    found: dict[str, dict] = {}
    passed: dict[str, dict] = {}
    file = out / "results.jsonl"
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            said = json.loads(line)
        except json.JSONDecodeError:  # cut off with its run
            continue
        name = said.pop("job")
        if "begin" in said:
            if found.get(name, {}).get("outcome") == "passed":
                passed[name] = found[name]
            found[name] = {"rows": []}
        elif "row" in said:
            found[name]["rows"].append(said["row"])
        else:
            found[name] |= said
    return found | {name: job for name, job in passed.items() if "outcome" not in found[name]}


def told(row: dict) -> str:
    """A row in a line."""
    if "errors" in row and "ms" not in row:
        return "off by " + ", ".join(f"{error:.1e} ({column})" for column, error in row["errors"].items())
    if "ms" not in row:
        return ", ".join(f"{key} {value}" for key, value in row.items() if not isinstance(value, (dict, list)))[:160]
    words = [f"{row['pass']}: {row['rate']:,.0f} {row['unit']}, {row['share']:.0%} of this GPU's own"]
    words += [f"{1 / ratio:.2f} of {column}" for column, ratio in row["ours_against"].items()]
    return ", ".join([*words, f"noise {row['noise']:.1%}"])


class Run:
    """Jobs under way, and where it is written down what they say."""

    def __init__(self, chosen: argparse.Namespace, results, log):
        self.chosen, self.results, self.log = chosen, results, log
        self.workers: set[Worker] = set()
        self.no_time: list[str] = []
        self.lock, self.stopped = threading.Lock(), False

    def note(self, job: Job, what: dict) -> None:
        with self.lock:
            print(json.dumps({"job": job.name} | what), file=self.results, flush=True)

    def lane(self, todo: collections.deque[Job], crowded: bool) -> None:
        """Do what is to be done, one after another, while other lanes do the same."""
        worker = None
        while not self.stopped:
            with self.lock:
                if not todo:
                    break
                job, spent = todo.popleft(), time.monotonic() - STARTED
            if job.seconds > self.chosen.budget - spent:
                self.no_time.append(job.name)
                continue
            if worker is None or job.alone:
                self.dismiss(worker)
                worker = Worker(self.chosen, self.log, crowded)
                self.workers.add(worker)
            ended = self.do(job, worker)
            if job.alone or ended["outcome"] not in ("passed", "skipped"):
                worker = self.dismiss(worker)
        self.dismiss(worker)

    def do(self, job: Job, worker: Worker) -> dict:
        """One job; returns its outcome."""
        began, lines = time.monotonic(), []
        self.note(job, {"begin": datetime.datetime.now().isoformat(timespec="seconds")})

        def note_row(row: dict) -> None:
            lines.append(f"    {told(row)}")
            self.note(job, {"row": row})

        ended = worker.run(job, job.patience_s, self.chosen.budget - (began - STARTED), note_row)
        now = time.monotonic()
        if ended["outcome"] == "timed out" and now - STARTED >= self.chosen.budget:
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
        """End all that is under way."""
        self.stopped = True
        for worker in tuple(self.workers):
            worker.end()


def run_all(chosen: argparse.Namespace, jobs: dict[str, Job], known: dict[str, dict]) -> dict[str, dict]:
    """Run the jobs that there is time for; returns what is known of all afterwards."""
    chosen.out.mkdir(parents=True, exist_ok=True)
    file = chosen.out / "results.jsonl"
    if file.exists() and not file.read_text().endswith("\n"):
        file.write_text(file.read_text() + "\n")
    with file.open("a") as results, (chosen.out / "log.txt").open("a") as log:
        run = Run(chosen, results, log)
        for beside, group in itertools.groupby(jobs.values(), key=lambda job: job.beside):
            todo = collections.deque(group)
            count = min(chosen.processes, len(todo)) if beside else 1
            with concurrent.futures.ThreadPoolExecutor(count) as pool:
                lanes = [pool.submit(run.lane, todo, count > 1) for _ in range(count)]
                try:
                    for lane in lanes:
                        lane.result()
                finally:
                    if not all(lane.done() for lane in lanes):
                        run.stop()
    if run.no_time:
        print(f"no time was left for {len(run.no_time)} jobs: run it again, and it goes on with {run.no_time[0]!r}")
    return known | read(chosen.out)


def show_plan(jobs: dict[str, Job], known: dict[str, dict], processes: int) -> None:
    """The jobs, how long they take, and what has become of them."""
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
    add("--processes", type=int, default=few, help="jobs side by side where no time is taken (3 for 4 cores, up to 12)")
    add("--plan", action="store_true", help="say what would run, and end")
    add("--record", action="store_true", help="write results/*_<gpu>.json from what --out has, and end")
    add("--jobs", default="gpu_jobs", help=argparse.SUPPRESS)
    add("--work", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run what there is to run; returns 1 where something is wrong."""
    chosen = options(argv)
    if not (chosen.plan or chosen.record or chosen.device == "cpu"):
        import torch

        if not torch.cuda.is_available():
            print("no GPU here, so there is nothing to run; --plan shows the jobs, --device cpu runs them tiny")
            return 0
    if chosen.work:
        rows = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # what is printed, from now on
        work(all_jobs(chosen.jobs, chosen.device), rows)
        return 0
    jobs = all_jobs(chosen.jobs, chosen.device)
    known = read(chosen.out)
    if chosen.record:
        for line in importlib.import_module(chosen.jobs).record(known):
            print(line)
        return 0
    if chosen.only:
        jobs = {name: job for name, job in jobs.items() if chosen.only in name}
        if not jobs:
            print(f"no job has {chosen.only!r} in its name; --plan shows them", file=sys.stderr)
            return 1
    if chosen.plan:
        show_plan(jobs, known, chosen.processes)
        return 0
    todo = jobs if chosen.only else {n: job for n, job in jobs.items() if "outcome" not in known.get(n, {})}
    known = run_all(chosen, todo, known)
    wrong = [n for n in jobs if known.get(n, {}).get("outcome", "passed") not in ("passed", "skipped")]
    print("\n".join([f"{len(wrong)} jobs did not pass:", *wrong] if wrong else ["nothing that ran is wrong"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(importlib.import_module("gpu").main())  # the module that the jobs import: its classes are theirs
