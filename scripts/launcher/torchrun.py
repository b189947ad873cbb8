"""torchrun's options: parsed as torchrun does, completed, and fully checked before anything is started."""

import argparse
import os

from launcher.port import check_port
from launcher.program import LaunchError, parse
from rank_entry import BACKENDS

SCRIPT = "rank_entry.py"  # placeholder for the script in a command line that is only parsed
ENVIRONMENT = ("OMP_NUM_THREADS", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")  # what `complete_options` may set as well
SAYS_WHAT_RUNS = {"module": "-m", "no_python": "--no-python", "run_path": "--run-path"}


def arguments(options: list[str], namespace: argparse.Namespace | None = None) -> argparse.Namespace:
    """Parse options with torchrun's own parser."""
    from torch.distributed.run import get_args_parser

    try:
        return parse(lambda words: get_args_parser().parse_args(words, namespace), [*options, "--", SCRIPT], "torchrun")
    except LaunchError as error:
        if "unrecognized" not in str(error):
            raise
        raise LaunchError(f"{error} (options of the program follow '--')") from None


def split_notebook(words: list[str]) -> tuple[str, list[str]]:
    """Return the notebook, or train, and torchrun's options from a command line with both in any order."""
    from torch.distributed.run import get_args_parser

    try:
        read = parse(get_args_parser().parse_args, words, "torchrun")
    except LaunchError as error:
        if "training_script" not in str(error):
            raise
        example = "launch_nb_torchrun.py notebooks/01_single_gpu.ipynb, or launch_nb_torchrun.py train"
        raise LaunchError(f"which notebook? As in: {example}") from None
    after = read.training_script_args  # torchrun takes all that follows the script for the script's own
    options = words[: len(words) - len(after) - 1] + after
    checked = arguments(options)
    if checked.training_script != SCRIPT:
        raise LaunchError(f"one notebook at a time: '{checked.training_script}' is too many (is a '--' missing?)")
    for name, option in SAYS_WHAT_RUNS.items():
        if getattr(checked, name):
            raise LaunchError(f"{option} says what torchrun runs: here it is the notebook's module, or train's")
    return read.training_script, options


def given(options: list[str]) -> set[str]:
    """Return the names of the options given on the command line or in torchrun's PET_ environment variables."""
    names = set(vars(arguments([]))) - {"training_script", "training_script_args"}
    parsed = vars(arguments(options, argparse.Namespace(**dict.fromkeys(names))))
    return {name for name in names if parsed[name] is not None or f"PET_{name.upper()}" in os.environ}


def complete_options(options: list[str], processes: str, local_processes: object) -> list[str]:
    """Return torchrun's options. processes: from the command line; local_processes: from the notebook."""
    count = process_count(processes, local_processes, gpu_count())
    if count > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(count)))
    options = [*rendezvous_options(options), "--nproc-per-node", str(count), *options]
    check(options)
    fewest, most = node_range(arguments(options).nnodes)
    if fewest < most:
        # With the store shared, which is the default, the agent of rank 0 names it in the first round alone (torch 2.11
        # and 2.13): a node that joins later waits for that name, and after a minute the whole job ends.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    return options


def process_count(asked: str, from_notebook: object, gpus: int) -> int:
    """Return the number of processes on this machine. gpus: the number of GPUs that NCCL would use."""
    from torch.distributed.run import determine_local_world_size

    if asked == "auto":
        if from_notebook is not None and not isinstance(from_notebook, int):
            raise LaunchError(f"the notebook's metadata, course.nproc_per_node, say {from_notebook!r}: not a number")
        asked = str(from_notebook if from_notebook is not None else gpus or 2)
    try:
        count = determine_local_world_size(asked)
    except ValueError:
        raise LaunchError(f"--nproc-per-node {asked}: not a number, nor auto, nor what this machine has") from None
    if count < 1:
        raise LaunchError(f"{count} processes: at least one is needed")
    if gpus and count > gpus:
        raise LaunchError(f"{count} processes, but {gpus} GPUs: NCCL needs one for each; try --nproc-per-node {gpus}")
    return count


def gpu_count() -> int:
    """Return the number of GPUs with a collective library of their own; 0 if the ranks run on the CPU with gloo."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.accelerator.device_count() if accelerator is not None and accelerator.type in BACKENDS else 0


def threads_per_rank(processes: int) -> int:
    """Return the CPU threads per rank: its share of the cores. Oversubscribed ranks run many times slower."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, cores // processes)


def node_range(nnodes: str) -> tuple[int, int]:
    """Return the minimum and maximum number of nodes; `--nnodes` is a number or a range."""
    from torch.distributed.run import parse_min_max_nnodes

    try:
        return parse_min_max_nnodes(nnodes)
    except (ValueError, RuntimeError):
        raise LaunchError(f"--nnodes {nnodes} is neither a number of nodes nor a range such as 1:4") from None


def rendezvous_options(options: list[str]) -> list[str]:
    """Return the options to add: a local rendezvous on a free port for one node, c10d if the user names an endpoint."""
    read, named = arguments(options), given(options)
    if "standalone" in named:
        return []
    if not named & {"rdzv_endpoint", "master_addr", "master_port", "rdzv_backend"}:
        if node_range(read.nnodes)[1] > 1:
            raise LaunchError(f"--nnodes {read.nnodes} needs --rdzv-endpoint HOST:PORT, the same on every node")
        # Without an address torchrun names this machine by a look-up that not every laptop answers.
        return ["--standalone"] if "local_addr" in named else ["--standalone", "--local-addr", "127.0.0.1"]
    return ["--rdzv-backend", "c10d"] if "rdzv_endpoint" in named and not named & {"rdzv_backend", "node_rank"} else []


def check(options: list[str]) -> None:
    """Let torchrun validate its options, and check the port."""
    from torch.distributed.run import config_from_args

    read = arguments(options)
    if read.log_dir and os.path.isfile(read.log_dir):
        raise LaunchError(f"--log-dir {read.log_dir} is a file")
    try:
        config_from_args(argparse.Namespace(**vars(read) | {"log_dir": os.devnull}))  # it would make the folder
    except Exception as error:  # AssertionError, ValueError, RuntimeError and more, for one bad value or another
        raise LaunchError(f"torchrun: {' '.join(str(error).split())}") from None
    check_port(read, several_nodes=node_range(read.nnodes)[1] > 1)
