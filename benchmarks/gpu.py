"""All that wants a GPU, by one command: is it right there, and how fast is it.

    python benchmarks/gpu.py --out DIR --budget 540     # or `make gpu`; what is done is skipped, so run it again
    python benchmarks/gpu.py --plan                     # the jobs and their estimated seconds; needs no GPU
    python benchmarks/gpu.py --out DIR --only linear    # the jobs with this in their names, done or not
    python benchmarks/gpu.py --out DIR --record         # benchmarks/results/*_<gpu>.json from what was measured
    python benchmarks/gpu.py --out DIR --device cpu     # all of it at tiny sizes, interpreted: times mean nothing

It runs from a bare checkout, with torch and triton alone; pytest, ncu, compute-sanitizer, Liger-Kernel and torchao are
used where they are. What is measured, and in which order, is in gpu_jobs.py; how, in kernel_runs.py.

Jobs run in a process beside this one, which is another one after each job that failed: an illegal access, a crash, a
hang or a wrong result costs its own job alone. DIR/results.jsonl gets a line as soon as there is something to say:

    {"job": name, "begin": date}    {"job": name, "row": {...}}    {"job": name, "outcome": "passed", "seconds": 12.3}

outcome: passed; skipped (a tool is not there); failed (an error, or a wrong result), crashed, timed out, with `error`.
DIR/log.txt has what the jobs print.
"""

import argparse
import contextlib
import datetime
import importlib
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
START_S = 60  # the most that a process may take until it begins its first job


@dataclass(frozen=True)
class Job:
    """Something to run. Its rows are written down as they come; it fails by raising."""

    name: str
    run: Callable[[], Iterable[dict]]
    seconds: float  # that it takes on an H200, estimated until `--plan --out DIR` knows better
    limit_s: float = 0.0  # when it counts as hung; 0: three times as long, and a minute
    alone: bool = False  # in a process of its own

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
    """The process beside, as this one sees it."""

    def __init__(self, module: str, device: str, log):
        command = [sys.executable, str(HERE / "gpu.py"), "--work", "--jobs", module, "--device", device]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
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
    if "ms" not in row:
        return ", ".join(f"{key} {value}" for key, value in row.items() if not isinstance(value, (dict, list)))[:160]
    words = [f"{row['pass']}: {row['rate']:,.0f} {row['unit']}, {row['share']:.0%} of this GPU's own"]
    words += [f"{1 / ratio:.2f} of {column}" for column, ratio in row["ours_against"].items()]
    return ", ".join([*words, f"noise {row['noise']:.1%}"])


def run_all(chosen: argparse.Namespace, jobs: dict[str, Job], known: dict[str, dict]) -> dict[str, dict]:
    """Run the jobs that there is time for; returns what is known of all afterwards."""
    start, worker, no_time = STARTED, None, []
    chosen.out.mkdir(parents=True, exist_ok=True)
    file = chosen.out / "results.jsonl"
    if file.exists() and not file.read_text().endswith("\n"):
        file.write_text(file.read_text() + "\n")
    with file.open("a") as results, (chosen.out / "log.txt").open("a") as log:

        def note(job: Job, what: dict) -> None:
            print(json.dumps({"job": job.name} | what), file=results, flush=True)

        def note_row(row: dict, job: Job) -> None:
            note(job, {"row": row})
            print(f"    {told(row)}", flush=True)

        try:
            for job in jobs.values():
                left = chosen.budget - (time.monotonic() - start)
                if job.seconds > left:
                    no_time.append(job.name)
                    continue
                if worker and job.alone:
                    worker = worker.end()
                worker = worker or Worker(chosen.jobs, chosen.device, log)
                print(f"{time.monotonic() - start:5.0f} s  {job.name}", flush=True)
                note(job, {"begin": datetime.datetime.now().isoformat(timespec="seconds")})
                began = time.monotonic()
                ended = worker.run(job, job.patience_s, left, lambda row, job=job: note_row(row, job))
                if ended["outcome"] == "timed out" and time.monotonic() - start >= chosen.budget:
                    ended = {"outcome": None, "error": "cut off, as the budget is used up"}  # it begins again next time
                else:
                    note(job, ended | {"seconds": round(time.monotonic() - began, 1)})
                if ended["outcome"] != "passed":
                    print(f"    {ended['outcome'] or 'not done'}: {ended['error']}", flush=True)
                if job.alone or ended["outcome"] not in ("passed", "skipped"):
                    worker = worker.end()
        finally:
            if worker:
                worker.end()
    if no_time:
        print(f"no time was left for {len(no_time)} jobs: run it again, and it goes on with {no_time[0]!r}")
    return known | read(chosen.out)


def show_plan(jobs: dict[str, Job], known: dict[str, dict]) -> None:
    """The jobs, how long they take, and what has become of them."""
    for job in jobs.values():
        about = known.get(job.name, {})
        seconds = about["seconds"] if about.get("outcome") == "passed" else job.seconds
        print(f"{seconds:6.0f} s  {job.name:<60} {about.get('outcome', '')}")
    total = sum(job.seconds for job in jobs.values())
    todo = sum(job.seconds for job in jobs.values() if known.get(job.name, {}).get("outcome") is None)
    print(f"{todo:6.0f} s  to come, of {total:.0f} s in all (estimates for an H200)")


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--out", type=Path, default=Path("gpu_run"), help="a folder, where an earlier run is gone on with")
    add("--budget", type=float, default=540, help="seconds; no job is begun that would not fit")
    add("--only", metavar="NAME", help="only jobs with this in their names, whether they are done or not")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny sizes, to see that all of it runs")
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
        show_plan(jobs, known)
        return 0
    todo = jobs if chosen.only else {n: job for n, job in jobs.items() if "outcome" not in known.get(n, {})}
    known = run_all(chosen, todo, known)
    wrong = [n for n in jobs if known.get(n, {}).get("outcome", "passed") not in ("passed", "skipped")]
    print("\n".join([f"{len(wrong)} jobs did not pass:", *wrong] if wrong else ["nothing that ran is wrong"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(importlib.import_module("gpu").main())  # the module that the jobs import: its classes are theirs
