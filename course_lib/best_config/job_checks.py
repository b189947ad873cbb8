"""Checks of a job before it is planned."""

from __future__ import annotations

import dataclasses
from numbers import Integral

from course_lib.best_config.clusters import Cluster
from course_lib.best_config.planned_config import count_parameters
from course_lib.expert_parallel.routing import Routing
from course_lib.single_gpu.config import ModelConfig

LARGEST = 10**8  # GPUs, or sequences of a batch: trying their divisors takes seconds


MOST_PARAMETERS = 10**15  # beyond them bytes overflow 64-bit integers


MOE_SIZES = {"ffn_hidden": 1, "shared": 0, "seed": 0}  # minimum of each argument of apply_moe besides Routing's


def is_size(value: object, least: int) -> bool:
    """Return True for a whole number of at least `least`."""
    return isinstance(value, Integral) and int(value) >= least


def check_moe_sizes(moe: dict) -> None:
    """Raise ValueError for arguments that `apply_moe` does not have, and for sizes that do not go together."""
    known = [*MOE_SIZES, *(field.name for field in dataclasses.fields(Routing))]
    if unknown := [name for name in moe if name not in known]:
        raise ValueError(f"moe: {', '.join(map(str, unknown))} is none of {', '.join(known)}")
    for name, least in ({"experts": 1, "top_k": 1} | MOE_SIZES).items():
        if name not in moe and name in MOE_SIZES or name == "ffn_hidden" and moe[name] is None:
            continue
        if not is_size(moe.get(name), least):
            raise ValueError(f"moe: {name} {moe.get(name)!r}: a whole number, {least} or more")
    try:
        Routing(**{name: value for name, value in moe.items() if name not in MOE_SIZES})
    except TypeError as error:  # a string in place of a number
        raise ValueError(f"moe: {error}") from None


def check_job(config: ModelConfig, cluster: Cluster, gpus: int, batch: int, seq: int, moe: dict | None = None) -> None:
    """Raise ValueError, in one line, for a job that cannot be planned: sizes of the job or the model that are below 1
    or not whole (ModelConfig has checked the heads), sizes above LARGEST, more parameters than MOST_PARAMETERS, an
    impossible mixture, or more GPUs than one node of a cluster without a network.
    """
    if not all(is_size(number, 1) for number in (gpus, batch, seq)):
        raise ValueError(f"gpus {gpus}, batch {batch}, seq {seq}: each is 1 or more, and whole")
    if max(gpus, batch, seq) > LARGEST:
        raise ValueError(f"gpus {gpus}, batch {batch}, seq {seq}: each is {LARGEST:,} or less")
    for name in ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "head_dim"):
        if not is_size(getattr(config, name), 1):
            raise ValueError(f"model: {name} {getattr(config, name)!r}: a whole number, 1 or more")
    if moe is not None:
        check_moe_sizes(moe)
    if (parameters := count_parameters(config, moe)[0]) > MOST_PARAMETERS:
        raise ValueError(f"model: {parameters:.0e} parameters: the planner counts {MOST_PARAMETERS:.0e} or fewer")
    if gpus > cluster.gpus_per_node and not cluster.network:
        raise ValueError(
            f"{cluster.name}: {gpus} GPUs are more than a node's {cluster.gpus_per_node}, and it has no network"
        )
