"""A sweep as Slurm array jobs: one task per run, on as many nodes as it needs, with results collected afterwards.

    write_arrays(runs, folder, time_limit_s)    runs.json, and a script for each number of nodes, to submit by sbatch
    collect(folder, csv)                        the rows of the tasks that have ended; any time, as often as wanted

All tasks of an array have the same number of nodes, so each number of nodes has its own array. Tasks run concurrently,
and no two write the same file: a task has a folder of its own, NUMBER-JOB, with each node's log and outcome, and only
`collect` writes the CSV. Each node ends its ranks at the time limit; Slurm's own limit, a little later, ends tasks that
are stuck. A task that Slurm has ended (scancel, its limit, a lost node) leaves no outcome: `collect` asks squeue for
it. The folder must be on a file system that all nodes share. (Tried with a Slurm of two nodes on one machine.)
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from course_kit.sweep.enclosed import ROOT, last_change, now
from course_kit.sweep.rows import Rows
from course_kit.sweep.runs import PROGRAM, Run, measure, refusal, refused, row_of
from course_lib.five_d.layouts import Layout

MARGIN_S = 180  # from a run's time limit to Slurm's
# States of a job that Slurm has ended, and of a job that has ended by itself; in other states it waits or runs.
ENDED_BY_SLURM = "BOOT_FAIL CANCELLED DEADLINE NODE_FAIL OUT_OF_MEMORY PREEMPTED TIMEOUT".split()
ENDED_ITSELF = "COMPLETED FAILED".split()
FORGOTTEN = "FORGOTTEN"  # ours: Slurm forgets a job some minutes after its end
SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=sweep-{nodes}n
#SBATCH --array={tasks}%{at_once}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --no-requeue
#SBATCH --time={minutes}
#SBATCH --output={folder}/%x-%A_%a.log

first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
folder={quoted}/$SLURM_ARRAY_TASK_ID-$SLURM_JOB_ID
mkdir "$folder" || exit 1
cd {root} || exit 1

srun --cpus-per-task="${{SLURM_CPUS_ON_NODE:-1}}" --kill-on-bad-exit=1 \\
    {python} -m course_kit.sweep.slurm "$folder" "$first_node:$port"
echo $? > "$folder/ended"
"""


def script(nodes: int, gpus: int, tasks: Sequence[int], folder: Path, time_limit_s: float, at_once: int) -> str:
    """Return the sbatch script of an array: `tasks`, numbers in runs.json, on `nodes` nodes of `gpus` ranks each."""
    return SCRIPT.format(
        nodes=nodes,
        gpus=gpus,
        tasks=",".join(str(task) for task in tasks),
        at_once=at_once,
        minutes=math.ceil((time_limit_s + MARGIN_S) / 60),
        folder=folder,
        quoted=shlex.quote(str(folder)),
        root=shlex.quote(str(ROOT)),
        python=shlex.quote(sys.executable),
    )


def write_arrays(
    runs: Sequence[Run], folder: Path, time_limit_s: float, at_once: int = 4, program: Sequence[str] = PROGRAM
) -> list[Path]:
    """Write runs.json and the scripts to a new folder; return the scripts. `collect` writes the rows of impossible
    runs.

    An array has one number of nodes, and of ranks per node. Raises ValueError if the folder exists, or its name has a %
    or a blank, which sbatch would interpret.
    """
    folder = folder.absolute()
    if "%" in str(folder) or any(letter.isspace() for letter in str(folder)):
        raise ValueError(f"{folder}: sbatch interprets a name with % or blanks: choose another")
    arrays = defaultdict(list)
    for number, run in enumerate(runs):
        if not refusal(run):
            arrays[run.nodes, run.layout.ranks // run.nodes].append(number)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"{folder}: {error.strerror}") from None
    plan = {"time_limit_s": time_limit_s, "program": list(program)}
    plan["runs"] = [asdict(run) | {"layout": str(run.layout)} for run in runs]
    (folder / "runs.json").write_text(json.dumps(plan, indent=1), encoding="utf-8")
    written = []
    for (nodes, gpus), tasks in sorted(arrays.items()):
        written.append(folder / f"array-{nodes}x{gpus}.sbatch")
        written[-1].write_text(script(nodes, gpus, tasks, folder, time_limit_s, at_once), encoding="utf-8")
    return written


def read_plan(folder: Path) -> tuple[list[Run], float, list[str]]:
    """Return the runs, their time limit and program. Raises ValueError for a folder that is not a sweep's."""
    try:
        plan = json.loads((folder / "runs.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} is no folder of a sweep's array jobs: {error}") from None
    runs = [
        Run(**each | {"layout": Layout.parse(each["layout"]), "options": tuple(each["options"])})
        for each in plan["runs"]
    ]
    return runs, plan["time_limit_s"], plan["program"]


def job_states(jobs: Sequence[str]) -> dict[str, str]:
    """Return the state of each job by squeue, FORGOTTEN for an unknown job; empty without Slurm."""
    if not jobs:
        return {}
    command = ["squeue", "--noheader", "--states=all", "--format=%A %T", f"--jobs={','.join(jobs)}"]
    try:
        done = subprocess.run(command, capture_output=True, check=False, text=True)
    except FileNotFoundError:
        return {}
    if done.returncode and "Invalid job id" not in done.stderr:
        return {}
    return dict.fromkeys(jobs, FORGOTTEN) | dict(line.split() for line in done.stdout.splitlines())


def end_of(attempt: Path, state: str | None) -> str | None:
    """Return how an attempt has ended: "" by itself, "ended by Slurm…" otherwise, None if it runs or is unknown."""
    if state in ENDED_BY_SLURM:
        return f"ended by Slurm: {state.lower().replace('_', ' ')}"
    if (attempt / "ended").exists():
        return ""
    return "ended by Slurm" if state in [*ENDED_ITSELF, FORGOTTEN] else None


def collect(folder: Path, csv: Path) -> list[dict]:
    """Add the rows of the tasks that have ended to the CSV; return these rows. If a run was submitted twice, its last
    attempt that has ended counts.
    """
    runs, time_limit_s, _ = read_plan(folder)
    attempts = [attempt for attempt in folder.iterdir() if re.fullmatch(r"\d+-\d+", attempt.name)]
    job = {attempt: attempt.name.partition("-")[2] for attempt in attempts}
    states = job_states([job[attempt] for attempt in attempts if not succeeded(attempt)])  # before `end_of` looks
    ends = {attempt: end_of(attempt, states.get(job[attempt])) for attempt in attempts}
    with Rows(csv) as rows:
        results = []
        for number, run in enumerate(runs):
            ended = [each for each in attempts if each.name.startswith(f"{number}-") and ends[each] is not None]
            before, forgotten = rows.of(run), False
            if why := refusal(run):
                row = refused(run, why, before["date"] if before else now())
            elif ended:
                last = max(ended, key=lambda attempt: int(job[attempt]))
                row = row_of(run, last, time_limit_s, ends[last] or "")
                row["date"] = row["date"] or last_change(last)
                forgotten = states.get(job[last]) == FORGOTTEN  # then the existing row may say more
            else:
                continue
            if before and before["date"] == row["date"] and (forgotten or before["why"] == row["why"]):
                results.append(before)
            else:
                results.append(rows.add(row))
    print(f"{len(results)} of {len(runs)} runs have ended; the others wait or run")
    return results


def succeeded(attempt: Path) -> bool:
    """Return True if a task's script has completed, and all nodes succeeded."""
    ended = attempt / "ended"
    return ended.exists() and ended.read_text(encoding="utf-8").strip() == "0"


def main(argv: list[str]) -> int:
    """Run one node of a task, FOLDER/NUMBER-JOB HOST:PORT. Exit status 1, for a failure, ends the other nodes."""
    folder, endpoint = Path(argv[0]), argv[1]
    runs, time_limit_s, program = read_plan(folder.parent)
    number, job = folder.name.split("-")
    run, rendezvous = runs[int(number)], None
    if run.nodes > 1:
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", job]
        rendezvous = ["--nnodes", str(run.nodes), *meeting]
    node = int(os.environ["SLURM_NODEID"])
    return int(measure(run, folder, time_limit_s, program, node, rendezvous).status != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
