"""The sbatch script that starts the launcher once on each node of a Slurm job.

The first node keeps the rendezvous, at a port made from the job's number, so that two jobs on one node do not meet.
Partition, account and the like are the site's own: sbatch reads them from SBATCH_PARTITION, SBATCH_ACCOUNT and so on.
"""

import re
import shlex

from launcher.program import LaunchError

SETS = "nnodes", "standalone", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "master_addr", "master_port", "node_rank"
FORM = "nodes=4,gpus=8[,time=1:00:00]"
TIME = re.compile(r"\d+(-\d+(:\d+){0,2}|(:\d+){1,2})?")  # minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
{time}#SBATCH --output=runs/slurm/%x-%j.log

first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))

# One launcher, so one torchrun, a node. What was exported when this script was written is what runs.
srun --kill-on-bad-exit=1 {launcher} --no-export \\
    --nnodes {nodes} --nproc-per-node {gpus} \\
    --rdzv-backend c10d --rdzv-endpoint "$first_node:$port" --rdzv-id "$SLURM_JOB_ID"{options}
"""


def parse(text: str) -> dict[str, str]:
    """`nodes=4,gpus=8[,time=1:00:00]` as a dictionary. Raises LaunchError with one line for the user."""
    wanted = dict(item.partition("=")[::2] for item in text.split(","))
    for key, value in wanted.items():
        if key not in ("nodes", "gpus", "time"):
            raise LaunchError(f"--slurm {text}: '{key}' is none of its keys; it takes {FORM}")
        if key == "time" and not TIME.fullmatch(value):
            raise LaunchError(f"--slurm {text}: '{value}' is no time as Slurm writes it, such as 90, 1:30:00 or 1-12")
        if key != "time" and not (value.isascii() and value.isdigit() and int(value) >= 1):
            raise LaunchError(f"--slurm {text}: {key} is a number of 1 or more, not '{value}'")
    for key in ("nodes", "gpus"):
        if key not in wanted:
            raise LaunchError(f"--slurm {text}: {key} is missing; it takes {FORM}")
    return wanted


def script(wanted: dict[str, str], name: str, launcher: list[str], options: list[str]) -> str:
    """The sbatch script. `launcher`: python, the launcher and the notebook; `options`: the user's own."""
    time = f"#SBATCH --time={wanted['time']}\n" if "time" in wanted else ""
    more = " \\\n    " + shlex.join(options) if options else ""
    return SCRIPT.format(
        name=name, nodes=wanted["nodes"], gpus=wanted["gpus"], time=time, launcher=shlex.join(launcher), options=more
    )
