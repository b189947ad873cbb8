"""Write and submit the sbatch script that starts the launcher once per node of a Slurm job.

The first node hosts the rendezvous, at a port derived from the job id, so that two jobs on one node do not collide.
A node's single task has the cores of all its ranks, `cpus` per GPU. By default that is 8: a rank has a thread for
Python, one for backward and some for its data and for NCCL, and a node of 8 GPUs has 64 cores or more. sbatch refuses
a request that no node can meet. With --max-restarts, Slurm requeues the job when a node dies and appends to its log.
Partition, account and the like are the site's own: sbatch reads them from SBATCH_PARTITION, SBATCH_ACCOUNT and so on.
"""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from launcher.program import LaunchError

SETS = "nnodes", "standalone", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "master_addr", "master_port", "node_rank"
FORM = "nodes=4,gpus=8[,cpus=8][,time=1:00:00]"
CPUS = 8  # default cores per GPU
# sbatch's errors if it is installed but Slurm was never set up, and if no controller answers.
NOT_SET_UP = "Could not establish a configuration source", "Unable to process configuration file"
NO_CONTROLLER = "Unable to contact slurm controller"
TIME = re.compile(r"\d+(-\d+(:\d+){0,2}|(:\d+){1,2})?")  # minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={cores}
#SBATCH --gpus-per-node={gpus}
{extra}#SBATCH --output=runs/slurm/%x-%j.log

first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))

# One launcher, so one torchrun, a node. What was exported when this script was written is what runs.
# srun does not take the cores from sbatch.
srun --cpus-per-task={cores} --kill-on-bad-exit=1 {launcher} --no-export \\
    --nnodes {nodes} --nproc-per-node {gpus} \\
    --rdzv-backend c10d --rdzv-endpoint "$first_node:$port" --rdzv-id "$SLURM_JOB_ID"{options}
"""


def parse(text: str) -> dict[str, str]:
    """Parse `nodes=4,gpus=8[,cpus=8][,time=1:00:00]` to a dictionary. Raises LaunchError with one line for the user."""
    wanted = dict(item.partition("=")[::2] for item in text.split(","))
    for key, value in wanted.items():
        if key not in ("nodes", "gpus", "cpus", "time"):
            raise LaunchError(f"--slurm {text}: '{key}' is none of its keys; it takes {FORM}")
        if key == "time" and not TIME.fullmatch(value):
            raise LaunchError(f"--slurm {text}: '{value}' is no time as Slurm writes it, such as 90, 1:30:00 or 1-12")
        if key != "time" and not (value.isascii() and value.isdigit() and int(value) >= 1):
            raise LaunchError(f"--slurm {text}: {key} is a number of 1 or more, not '{value}'")
    for key in ("nodes", "gpus"):
        if key not in wanted:
            raise LaunchError(f"--slurm {text}: {key} is missing; it takes {FORM}")
    return wanted


def script(wanted: dict[str, str], name: str, launcher: list[str], options: list[str], restarts: bool) -> str:
    """Return the sbatch script. launcher: python, the launcher and the notebook, or train; options: the user's own;
    restarts: whether Slurm requeues the job after a node failure.
    """
    extra = [f"--time={wanted['time']}"] if "time" in wanted else []
    extra += ["--requeue", "--open-mode=append"] if restarts else []
    return SCRIPT.format(
        name=name,
        nodes=wanted["nodes"],
        gpus=wanted["gpus"],
        cores=int(wanted["gpus"]) * int(wanted.get("cpus", CPUS)),
        extra="".join(f"#SBATCH {option}\n" for option in extra),
        launcher=shlex.join(launcher),
        options=" \\\n    " + shlex.join(options) if options else "",
    )


def submit(text: str, name: str) -> int:
    """Write the sbatch script to runs/slurm/ in the current folder, and submit it if Slurm is available."""
    file = Path("runs/slurm") / f"{name}.sbatch"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"cannot write {file}: {error.strerror}") from None
    if not shutil.which("sbatch"):
        print(f"{file} is written; this machine has no sbatch: submit it where there is one, by 'sbatch {file}'")
        return 0
    done = subprocess.run(["sbatch", str(file)], check=False, capture_output=True, text=True)
    if done.returncode and any(words in done.stderr for words in NOT_SET_UP):
        print(f"{file} is written; this machine's sbatch is not set up: submit it where it is, by 'sbatch {file}'")
        return 0
    if done.returncode and NO_CONTROLLER in done.stderr:
        raise LaunchError(f"{file} is written, and not submitted: Slurm's controller does not answer")
    print(f"{file} is written\n{done.stdout}", end="", flush=True)
    print(done.stderr, end="", file=sys.stderr)
    return 1 if done.returncode else 0
