"""Memory and work of a pipeline's stages in closed form: for one layout, or for arrays of layouts.

    in flight      1F1B min(p, m), AFAB m, interleaved p + (p-1)/v, ZB-H2 2p - 1, DualPipe p + 1
    bubble         1F1B p - 1 slots; shares of it: interleaved 1/v, ZB-H1, ZB-H2 1/3, ZB-V 1/6, DualPipe (p-2)/(p-1)/3

for t_f = t_i = t_w. Notebook 09's simulator plays the same action by action; tests compare the two. A bubble here lasts
from the first rank's start to the last one's end, since a step that clips gradients ends for all ranks together. (Qi et
al. 2023 count the span of each rank, in which ZB-H2 and ZB-V have no bubble.)
"""

from __future__ import annotations

import numpy as np

from course_lib.single_gpu.config import ModelConfig


def is_schedule(layout, *names: str) -> np.ndarray:
    """Return the layouts that have a pipeline with one of these schedules."""
    return np.isin(np.asarray(layout.schedule), names) & (np.asarray(layout.pp) > 1)


# exercise 11.2
def in_flight(layout, m) -> np.ndarray:
    """Return the largest number of micro-batches in flight on the first rank, each with all of the rank's layers.

    layout: one, or arrays of several; m: micro-batches per step. Without a pipeline it is 1. (Notebook 09's `validate`
    counts the same action by action.)
    """
    pp, v = np.asarray(layout.pp), np.asarray(layout.virtual)
    held = np.minimum(pp, m)
    held = np.where(is_schedule(layout, "afab"), m, held)
    held = np.where(is_schedule(layout, "naive"), 1, held)
    held = np.where(is_schedule(layout, "interleaved") & (v > 1), np.minimum(pp + (pp - 1) / v, m), held)
    held = np.where(is_schedule(layout, "zb-h2"), np.minimum(2 * pp - 1, m), held)
    return np.where(is_schedule(layout, "dualpipe"), pp + 1, held)


# exercise 11.2
def bubble_share(layout, m) -> np.ndarray:
    """Return the bubble as a share of 1F1B's p - 1 slots, from the first start to the last end, with t_f = t_i = t_w.

    layout: one, or arrays of several; m: micro-batches per step. Without a pipeline the value does not matter.
    """
    pp, v = np.asarray(layout.pp), np.asarray(layout.virtual)
    of_all = 3 * np.maximum(pp - 1, 1)  # 1F1B's, in units of t_f
    short = np.maximum(0, 2 * pp - 1 - m)  # micro-batches that the zero-bubble schedules lack
    share = np.where(is_schedule(layout, "interleaved"), 1 / v, 1.0)
    share = np.where(is_schedule(layout, "naive"), m, share)
    share = np.where(is_schedule(layout, "zb-h1"), (pp - 1 + np.maximum(0, pp - m)) / of_all, share)
    share = np.where(is_schedule(layout, "zb-h2"), (pp - 1 + short // 2) / of_all, share)
    share = np.where(is_schedule(layout, "zb-v"), np.maximum((pp - 1) / 2, short) / of_all, share)
    return np.where(is_schedule(layout, "dualpipe"), (pp - 2) / of_all, share)


def later_in_flight(layout, m, later) -> np.ndarray:
    """Return `in_flight` of the rank that is `later` ranks behind the first: per rank one fewer under 1F1B, 2/v fewer
    if interleaved; under other schedules the same as on the first rank.
    """
    pp, v, most = np.asarray(layout.pp), np.asarray(layout.virtual), in_flight(layout, m)
    chunks = is_schedule(layout, "interleaved") & (v > 1)
    fewer = np.where(chunks, np.minimum(pp + (pp - 1) / v - 2 * later / v, m), np.minimum(pp - later, m))
    return np.where(chunks | is_schedule(layout, "1f1b", "interleaved"), np.maximum(fewer, 1 / v), most)


def stage_layers(config: ModelConfig, pp, split: str, head: float) -> dict[str, np.ndarray]:
    """Return the layers of a pipeline's first, second and last stage; the second one is a fullest one. head: FLOPs of
    the output layer, in layers.

    split: "ends": the embedding and the head count as a layer each (notebook 09); "layers": they count as none
    (Megatron-LM); "flops": a stage ends with the layer that reaches its share of all FLOPs (nanotron).
    """
    pp, layers = np.asarray(pp), config.layers
    if split == "ends":
        each, larger = np.divmod(layers + 2, pp)
        first, second, last = each - 1, each + (larger > 0), each - 1 + (larger == pp - 1)
    elif split == "layers":
        first, second, last = -(-layers // pp), -(-layers // pp), layers // pp
    else:
        share = (layers + head) / pp
        first = np.minimum(np.ceil(share - 1e-9), layers)
        before_last = np.ceil(share * (pp - 1) - 1e-9)
        second, last = first, layers - before_last
    one = pp == 1
    return {
        "first": np.where(one, layers, first),
        "second": np.where(pp > 2, second, 0),
        "last": np.where(one, layers, np.maximum(last, 0)),
    }


def rank_layers(config: ModelConfig, layout, split: str, head: float) -> dict[str, np.ndarray]:
    """Return `stage_layers` of ranks with several stages each (interleaved, ZB-V), split by "ends" as in notebook 09:
    the larger stages are in the middle, which ZB-V puts on the last ranks, and interleaving spreads over all ranks.

    "second" is the fullest rank between the first and the last. Under ZB-V the first rank has embedding and head.
    """
    pp, of_one_stage = np.asarray(layout.pp), stage_layers(config, layout.pp, split, head)
    if split != "ends":
        return of_one_stage
    zb_v, v = is_schedule(layout, "zb-v"), np.asarray(layout.virtual)
    chunks = np.where(zb_v, 2, np.where(is_schedule(layout, "interleaved"), v, 1))
    each, count = np.divmod(config.layers + 2, pp * chunks)  # count: of the larger stages
    start, end = (pp * chunks - count + 1) // 2, (pp * chunks + count + 1) // 2  # of the larger stages

    def larger(rank) -> np.ndarray:
        spread = count // pp + ((rank - start) % pp < count % pp)
        return np.where(zb_v, 1 * (rank >= start) + (2 * pp - 1 - rank < end), spread)

    ends = {
        "first": chunks * each + larger(0) - 1 - zb_v,
        "second": chunks * each
        + np.maximum(larger(1), np.maximum(larger(pp - 2), larger(np.clip(start % pp, 1, pp - 2)))),
        "last": chunks * each + larger(pp - 1) - 1 + zb_v,
    }
    ends["second"] = np.where(pp > 2, ends["second"], 0)
    return {name: np.where(chunks > 1, layers, of_one_stage[name]) for name, layers in ends.items()}


def fills_stages(config: ModelConfig, pp, split: str, head: float) -> np.ndarray:
    """Return the values of pp that leave no stage empty. nanotron's list of blocks ends with norm and head (together),
    a cast, and the loss.
    """
    if split != "flops":
        return np.asarray(pp) <= config.layers + 2 * (split == "ends")
    with_head = np.floor(config.layers * np.asarray(pp) / (config.layers + head) + 1e-9)
    return (with_head >= np.asarray(pp) - 3) & (np.asarray(pp) <= config.layers + 4)
