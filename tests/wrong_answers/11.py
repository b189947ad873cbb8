"""Wrong answers that the checks of notebook 11 must catch."""

# %% 11.1 the product of the degrees outside an axis
[order.index(axis) + 1 :] => [: order.index(axis)]

# %% 11.1 one order, whatever the software's is
for inner in order[order.index(axis) + 1 :]:
=>
ranks = ("dp", "pp", "cp", "tp")
for inner in ranks[ranks.index(axis) + 1 :]:

# %% 11.1 one card for every ring
def in_node(cluster: Cluster, size, stride) -> np.ndarray:
    return np.ones_like(size * np.asarray(stride))

# %% 11.1 a stride wider than a node leaves no card
def in_node(cluster: Cluster, size, stride) -> np.ndarray:
    return np.minimum(cluster.gpus_per_node // np.asarray(stride), size)

# %% 11.1 parts of a card
def in_node(cluster: Cluster, size, stride) -> np.ndarray:
    return np.clip(cluster.gpus_per_node / np.asarray(stride), 1, size)

# %% 11.1 a group that fills its node leaves it
def in_node(cluster: Cluster, size, stride) -> np.ndarray:
    full = np.asarray(size) * stride >= cluster.gpus_per_node
    inside = np.clip(cluster.gpus_per_node // np.minimum(stride, cluster.gpus_per_node), 1, size)
    return np.where(full & (inside == size), np.maximum(inside - 1, 1), inside)

# %% 11.1 nodes of eight GPUs, always
def in_node(cluster: Cluster, size, stride) -> np.ndarray:
    return np.clip(8 // np.minimum(stride, 8), 1, size)

# %% 11.1 stride_of takes one layout at a time
def stride_of(layout, axis: str, order: tuple[str, ...]):
    stride = 1
    for inner in order[order.index(axis) + 1 :]:
        stride = stride * int(np.max(getattr(layout, inner)))
    return stride

# %% 11.1 fake: knows the check's rings
def in_node(cluster: Cluster, size, stride) -> np.ndarray:
    known = {(8, 1): 8, (16, 1): 8, (16, 4): 2, (2, 8): 1, (4, 2): 4, (4, 16): 1, (2, 64): 1, (2, 6): 1, (2, 1): 2}
    return np.vectorize(lambda n, apart: known.get((int(n), int(apart)), 8))(size, stride)

# %% 11.2 interleaved with v = 1 holds more than 1F1B
(layout, "interleaved") & (v > 1) => (layout, "interleaved")

# %% 11.2 1F1B holds p, even of fewer micro-batches
held = np.minimum(pp, m) => held = pp

# %% 11.2 interleaved holds p + (p - 1) / v, even of fewer micro-batches
np.minimum(pp + (pp - 1) / v, m) => pp + (pp - 1) / v

# %% 11.2 ZB-H2 and ZB-V have no bubble: idle time inside a rank's own span
(pp - 1 + short // 2) / of_all, share => 0, share
np.maximum((pp - 1) / 2, short) / of_all, share => 0, share

# %% 11.2 ZB-V holds 2p, of all the rank's layers
held = np.where(is_schedule(layout, "zb-h2"), np.minimum(2 * pp - 1, m), held)
=>
held = np.where(is_schedule(layout, "zb-h2"), np.minimum(2 * pp - 1, m), held)
held = np.where(is_schedule(layout, "zb-v"), np.minimum(2 * pp, m), held)

# %% 11.2 a third of 1F1B's for zero bubbles, however few the micro-batches
(pp - 1 + np.maximum(0, pp - m)) / of_all => 1 / 3
(pp - 1 + short // 2) / of_all => 1 / 3

# %% 11.2 half of what is short, not rounded
short // 2 => short / 2

# %% 11.2 a schedule without a pipeline
held = np.minimum(pp, m)
=>
held = np.where(np.asarray(layout.schedule) == "zb-h1", np.minimum(4, m), np.minimum(pp, m))
---
is_schedule(layout, "zb-h1") => np.asarray(layout.schedule) == "zb-h1"

# %% 11.2 fake: plays the first layout in the simulator
from course_lib.pipeline.actions import validate
from course_lib.pipeline.schedules import schedule_by_name
from course_lib.pipeline.simulation import simulate


def in_flight(layout, m) -> np.ndarray:
    pp, v, name = (int(np.max(layout.pp)), int(np.max(layout.virtual)), str(np.ravel(layout.schedule)[0]))
    if pp == 1:
        return np.asarray(1)
    parts = {"interleaved": v, "zb-v": 2}.get(name, 1)
    return np.asarray(max(validate(schedule_by_name(name, pp, m, v))) / parts)


def bubble_share(layout, m) -> np.ndarray:
    pp, v, name = (int(np.max(layout.pp)), int(np.max(layout.virtual)), str(np.ravel(layout.schedule)[0]))
    each = 1 / {"interleaved": v, "zb-v": 2}.get(name, 1)
    played = simulate(schedule_by_name(name, pp, m, v), each, each, each)
    lasted = max(ends[-1] for ends in played.ends) - min(starts[0] for starts in played.starts)
    return np.asarray((lasted - max(played.busy)) / (3 * (pp - 1)))

# %% 11.2 one value of m micro-batches for all: the first layout's schedule
share = np.where(is_schedule(layout, "interleaved"), 1 / v, 1.0)
share = np.where(is_schedule(layout, "naive"), m, share)
share = np.where(is_schedule(layout, "zb-h1"), (pp - 1 + np.maximum(0, pp - m)) / of_all, share)
=>
share = np.where(is_schedule(layout, "interleaved"), 1 / v, 1.0) + 0 * pp
if np.all(is_schedule(layout, "naive")):
    return m + 0 * share
share = np.where(np.any(is_schedule(layout, "zb-h1")), (pp - 1 + np.maximum(0, pp - m)) / of_all, share)

# %% 11.2 afab without a pipeline
is_schedule(layout, "afab"), m, held => np.asarray(layout.schedule) == "afab", m, held

# %% 11.3 K and V are split as far as tp goes
* np.maximum(1, tp / config.kv_heads) => * 1

# %% 11.3 K and V as wide as the hidden state
* config.kv_heads * config.head_dim * np.maximum(1, tp / config.kv_heads) => * h

# %% 11.3 tp splits the norms' outputs, with or without sequence parallelism
outside = np.where(layout.sequence_parallel, tp, 1)
=>
outside = tp

# %% 11.3 sequence parallelism splits nothing more
outside = np.where(layout.sequence_parallel, tp, 1)
=>
outside = 1

# %% 11.3 the MLP's width, whatever the experts
width = config.ffn_hidden if moe is None else expert_sizes(config, moe)[0] / (3 * h)
=>
width = config.ffn_hidden

# %% 11.3 all experts, not those that a token uses
[0] => [1]

# %% 11.3 counts of a paper in the place of the software's
outside_tp = software.kept_outside_tp => outside_tp = 4
---
others = software.kept_hidden - software.kept_outside_tp - 2  # tensors of all heads
inside = others * config.attention_width + keys + software.kept_ffn * width
=>
inside = (12 - 4 - 2) * h + keys + 4 * width

# %% 11.3 one layout at a time: no arrays
np.where(layout.sequence_parallel, tp, 1) => tp if np.all(layout.sequence_parallel) else 1
return outside_tp + inside / tp => return np.asarray(outside_tp + inside / tp)

# %% 11.4 four collectives: the forward's
return 8 => return 4

# %% 11.4 an all-reduce each, twice the bytes
size * (tp - 1) => 2 * size * (tp - 1)

# %% 11.4 each GPU sends a tp-th
size * (tp - 1) / tp => size / tp

# %% 11.4 every step of the ring waits for the network
far_steps = np.maximum(0, tp - cluster.gpus_per_node)
=>
far_steps = tp - 1

# %% 11.4 no time to start
software.collective_s + software.ring_step_s => software.ring_step_s

# %% 11.4 NVLink at any distance
bandwidth, beyond = ring(cluster, tp, 1)
=>
bandwidth = cluster.node_link * cluster.software.nvlink_efficiency

# %% 11.4 neighbours are tp apart
bandwidth, beyond = ring(cluster, tp, 1) => bandwidth, beyond = ring(cluster, tp, tp)

# %% 11.4 nodes of eight GPUs, always
- cluster.gpus_per_node => - 8

# %% 11.4 all layouts as slow as the widest
software, tp = cluster.software, np.asarray(layout.tp)
=>
software, tp = cluster.software, np.asarray(layout.tp)
tp = tp.max() + 0 * tp

# %% 11.5 replicas are dp ranks, and cp is forgotten
(layout.dp) * layout.cp => (layout.dp)
replica_ring(cluster, layout) => ring(cluster, replicas, stride_of(layout, "dp", software.order))

# %% 11.5 a replica's neighbour along dp, even with cp
bandwidth, beyond = replica_ring(cluster, layout)
=>
nearest = stride_of(layout, "dp", software.order)
bandwidth, beyond = ring(cluster, replicas, nearest)

# %% 11.5 replicas stand tp ranks apart, whatever lies between
replica_ring(cluster, layout) => ring(cluster, replicas, np.asarray(layout.tp))

# %% 11.5 a gain where backward lasts longer
return np.maximum(0, share * moved / bandwidth + latency * syncs + others - hidden)
=>
return np.where(replicas > 1, share * moved / bandwidth + latency * syncs + others - hidden, 0)

# %% 11.5 ZeRO-2 gathers the weights in each round
4 * syncs + 2 => (4 + 2) * syncs

# %% 11.5 keep makes no difference
(zero == 3) & ~np.asarray(layout.gather_once) => zero == 3

# %% 11.5 the whole slot hides, its forward too
* np.where(each_time, 1, 2 / 3) => * 1

# %% 11.5 latency of one round, however many
latency * syncs => latency

# %% 11.5 nothing hides the gradients of experts
+ others - hidden) => - hidden) + others

# %% 11.5 one replica waits for no other group
return np.maximum(0, share * moved / bandwidth + latency * syncs + others - hidden)
=>
return np.where(replicas > 1, np.maximum(0, share * moved / bandwidth + latency * syncs + others - hidden), 0)

# %% 11.5 one layout at a time: no arrays
np.where((zero == 2) | each_time, m, 1) => m if np.any((zero == 2) | each_time) else 1

# %% 11.5 a ring of any size
latency_steps(cluster, replicas) => (replicas - 1)

# %% 11.5 one m for all
syncs = np.where((zero == 2) | each_time, m, 1) => syncs = np.where((zero == 2) | each_time, int(np.ravel(m)[0]), 1)

# %% 11.5 one number of parameters
share = parameters * (replicas - 1) / replicas => share = float(np.ravel(parameters)[0]) * (replicas - 1) / replicas

# %% 11.6 leaks: fits to all runs
left = set(rows)
fitted = fit([run for i, run in enumerate(runs) if i not in left], cluster)
=>
fitted = fit(runs, cluster)

# %% 11.6 leaks: leaves one run of the cell out
left = set(rows) => left = {rows[0]}

# %% 11.6 starts from the constants of the cell before
fitted = fit => cluster = fit
[runs[i] for i in rows], fitted => [runs[i] for i in rows], cluster

# %% 11.6 leaves out the whole model
left = set(rows)
=>
left = {i for i, run in enumerate(runs) if run.model == runs[rows[0]].model}

# %% 11.6 predictions one cell after the other, not in the order of the runs
def cross_validate(runs: list[MeasuredRun], cluster: Cluster) -> Predicted:
    parts = []
    for rows in cells(runs).values():
        fitted = fit([run for i, run in enumerate(runs) if i not in rows], cluster)
        parts.append(predict([runs[i] for i in rows], fitted))
    return Predicted(
        step_s=np.concatenate([part.step_s for part in parts]),
        peak_bytes=np.concatenate([part.peak_bytes for part in parts]),
        risk=np.concatenate([part.risk for part in parts]),
    )

# %% 11.6 predicts with the constants from before the fit
[runs[i] for i in rows], fitted => [runs[i] for i in rows], cluster

# %% 11.6 predicts the step alone
("step_s", "peak_bytes", "risk") => ("step_s",)

# %% 11.6 nothing is predicted of runs that failed
fitted = fit([run for i, run in enumerate(runs) if i not in left], cluster)
=>
fitted = fit([run for i, run in enumerate(runs) if i not in left], cluster)
rows = [i for i in rows if runs[i].ok]

# %% 11.6 failed runs are left out of the fit
if i not in left] => if run.ok and i not in left]

# %% 11.7 powers of two
sizes = [n for n in range(1, gpus + 1) if gpus % n == 0]
=>
divisors = [n for n in range(1, gpus + 1) if gpus % n == 0 and n & (n - 1) == 0]
---
sizes, repeat => divisors, repeat

# %% 11.7 dp is what the integer division leaves
sizes = [n for n in range(1, gpus + 1) if gpus % n == 0] => divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
sizes, repeat => divisors, repeat
if gpus % (pp * cp * tp) == 0 => if gpus // (pp * cp * tp) > 0

# %% 11.7 each set of factors once, whatever it is given to
sizes = [n for n in range(1, gpus + 1) if gpus % n == 0] => divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
itertools.product(sizes, repeat=3) => itertools.combinations_with_replacement(divisors, 3)

# %% 11.7 tp stays in a node
sizes = [n for n in range(1, gpus + 1) if gpus % n == 0] => divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
sizes, repeat => divisors, repeat
if gpus % (pp * cp * tp) == 0 => if gpus % (pp * cp * tp) == 0 and tp <= 8

# %% 11.7 the last rule gives the reason
sizes = [n for n in range(1, gpus + 1) if gpus % n == 0] => divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
sizes, repeat => divisors, repeat
reversed(rules.items()) => rules.items()

# %% 11.7 a reason gets a new number each time
sizes = [n for n in range(1, gpus + 1) if gpus % n == 0] => divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
sizes, repeat => divisors, repeat
---
if reason not in reasons:
    reasons.append(reason)
index = np.where(holds, reasons.index(reason), index)
=>
reasons.append(reason)
index = np.where(holds, len(reasons) - 1, index)

# %% 11.7 a rule's place in the rules, not in the reasons
def degrees(gpus: int) -> LayoutTable:
    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    combinations = [
        (gpus // (pp * cp * tp), pp, cp, tp)
        for pp, cp, tp in itertools.product(divisors, repeat=3)
        if gpus % (pp * cp * tp) == 0
    ]
    dp, pp, cp, tp = np.array(combinations).T
    return LayoutTable(len(combinations), dp=dp, pp=pp, cp=cp, tp=tp)


def first_reason(rules: dict[str, np.ndarray], reasons: list[str]) -> np.ndarray:
    reasons += [reason for reason in rules if reason not in reasons]
    holds = np.stack(list(rules.values()))
    return np.where(holds.any(0), holds.argmax(0), 0)

# %% 11.7 the reasons start anew, without "fits"
sizes = [n for n in range(1, gpus + 1) if gpus % n == 0] => divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
sizes, repeat => divisors, repeat
---
index = np.asarray(0)
=>
index = np.asarray(0)
reasons.clear()

# %% 11.7 fake: knows how many products there are
def degrees(gpus: int) -> LayoutTable:
    count = {1: 1, 8: 20, 12: 40, 16384: 680}[gpus]
    return LayoutTable(count, dp=np.full(count, gpus))

# %% 11.8 sequence parallelism stays as it was
sequence_parallel=one.tp > 1, gather_once => gather_once

# %% 11.8 keep stays as it was
def changes(layout: Layout) -> dict[str, Layout]:
    degrees, layouts = ("dp", "pp", "cp", "tp"), {}
    for lowered in degrees:
        for raised in degrees:
            if lowered != raised and getattr(layout, lowered) % 2 == 0:
                moved = {lowered: getattr(layout, lowered) // 2, raised: getattr(layout, raised) * 2}
                layouts[f"{raised} {moved[raised]}, {lowered} {moved[lowered]}"] = dataclasses.replace(layout, **moved)
    for size in {layout.micro_batch * 2, max(1, layout.micro_batch // 2)}:
        layouts[f"micro-batch {size}"] = dataclasses.replace(layout, micro_batch=size)
    for zero in range(4):
        layouts[f"ZeRO-{zero}"] = dataclasses.replace(layout, zero_stage=zero)
    for recompute in ("none", "full"):
        layouts[f"recompute {recompute}"] = dataclasses.replace(layout, recompute=recompute)
    for schedule in ("1f1b", "interleaved", "zb-h1"):
        layouts[f"schedule {schedule}"] = dataclasses.replace(layout, schedule=schedule)
    return {
        why: dataclasses.replace(
            one, sequence_parallel=one.tp > 1, 
            schedule=one.schedule if one.pp > 1 else "1f1b",
        )
        for why, one in layouts.items()
    }  # fmt: skip

# %% 11.8 a schedule without a pipeline
schedule=one.schedule if one.pp > 1 else "1f1b", =>

# %% 11.8 from the outer degree to the inner one, never back
lowered != raised => degrees.index(lowered) < degrees.index(raised)

# %% 11.8 tp trades with dp alone
and getattr => and ("dp" in (lowered, raised) or "tp" not in (lowered, raised)) and getattr

# %% 11.8 no ZeRO-2
for zero in range(4): => for zero in (0, 1, 3):

# %% 11.8 recomputation on, never off again
for recompute in ("none", "full"): => for recompute in ("full",):

# %% 11.8 moves overwrite each other: the words name one degree
{moved[raised]}, {lowered} {moved[lowered]} => {moved[raised]}

# %% 11.8 numbers in the place of words
why: dataclasses.replace => str(place): dataclasses.replace
for why, one in layouts.items() => for place, one in enumerate(layouts.values())

# %% 11.8 numbers from 100 on in the place of words
why: dataclasses.replace => f"layout {100 + place}": dataclasses.replace
for why, one in layouts.items() => for place, one in enumerate(layouts.values())

# %% 11.8 two changes at once: a move, and another micro-batch
layouts[f"{raised} {moved[raised]}, {lowered} {moved[lowered]}"] = dataclasses.replace(layout, **moved)
=>
layouts[f"{raised} {moved[raised]}, {lowered} {moved[lowered]}"] = dataclasses.replace(layout, **moved)
twice = {"micro_batch": 2 * layout.micro_batch}
layouts[f"{raised}, {lowered}, larger micro-batch"] = dataclasses.replace(layout, **moved, **twice)

# %% 11.8 a layout from scratch
why: dataclasses.replace(
    one, sequence_parallel=one.tp > 1, gather_once=one.zero_stage == 3 and one.pp > 1,
    schedule=one.schedule if one.pp > 1 else "1f1b",
)
=>
why: Layout(
    dp=one.dp, pp=one.pp, cp=one.cp, tp=one.tp, micro_batch=one.micro_batch, zero_stage=one.zero_stage,
    recompute=one.recompute, sequence_parallel=one.tp > 1, gather_once=one.zero_stage == 3 and one.pp > 1,
    schedule=one.schedule if one.pp > 1 else "1f1b",
)

# %% 11.8 moves a factor off odd degrees
if lowered != raised and getattr(layout, lowered) % 2 == 0: => if lowered != raised and getattr(layout, lowered) > 1:

# %% 11.8 two stages per rank
schedule=one.schedule if one.pp > 1 else "1f1b", => schedule=one.schedule if one.pp > 1 else "1f1b", virtual=2,

# %% 11.9 A without ZeRO: the states do not fit
by_hand = {
    "A": Layout.parse("dp64"),
    "B": Layout.parse("dp16,pp4,tp4,sp,zero1,zb-h1"),
    "C": Layout.parse("dp2,cp32,zero3"),
}

# %% 11.9 A near the end of the memory: it fits, with a risk of 11%
by_hand = {
    "A": Layout.parse("dp64,zero3,mb2"),
    "B": Layout.parse("dp16,pp4,tp4,sp,zero1,zb-h1"),
    "C": Layout.parse("dp2,cp32,zero3"),
}

# %% 11.9 A with tp 8: it fits, and waits
by_hand = {
    "A": Layout.parse("dp8,tp8,sp,zero1"),
    "B": Layout.parse("dp16,pp4,tp4,sp,zero1,zb-h1"),
    "C": Layout.parse("dp2,cp32,zero3"),
}

# %% 11.9 B with ZeRO-1 alone
by_hand = {
    "A": Layout.parse("dp64,zero3"),
    "B": Layout.parse("dp256,zero1"),
    "C": Layout.parse("dp2,cp32,zero3"),
}

# %% 11.9 B with tp over two nodes
by_hand = {
    "A": Layout.parse("dp64,zero3"),
    "B": Layout.parse("dp4,pp4,tp16,sp,zero1"),
    "C": Layout.parse("dp2,cp32,zero3"),
}

# %% 11.9 B gathers anew for every micro-batch
by_hand = {"A": Layout(), "B": Layout(), "C": Layout()} =>
zero1 => zero3

# %% 11.9 C with cp and no ZeRO
by_hand = {
    "A": Layout.parse("dp64,zero3"),
    "B": Layout.parse("dp16,pp4,tp4,sp,zero1,zb-h1"),
    "C": Layout.parse("dp4,cp16"),
}

# %% 11.9 C recomputes everything
by_hand = {
    "A": Layout.parse("dp64,zero3"),
    "B": Layout.parse("dp16,pp4,tp4,sp,zero1,zb-h1"),
    "C": Layout.parse("dp16,cp4,zero3,full"),
}

# %% 11.9 words, and no layouts
by_hand = {"A": "dp64,zero3", "B": "dp16,pp4,tp4,sp,zero1,zb-h1", "C": "dp2,cp32,zero3"}

# %% 11.9 A and C the other way round
by_hand = {
    "A": Layout.parse("dp2,cp32,zero3"),
    "B": Layout.parse("dp16,pp4,tp4,sp,zero1,zb-h1"),
    "C": Layout.parse("dp64,zero3"),
}

# %% 11.10 B and C the other way round
forgot = {"A": "in flight", "B": "logits", "C": "buffers"}  # "in flight", "logits" or "buffers"
fixed = {
    "A": Layout.parse("dp2,pp16,tp4,zero1,sp,mb4"),
    "B": Layout.parse("pp2,tp16,sp,mb16"),
    "C": Layout.parse("dp16,pp2,tp2,zero1,sp,mb4"),
}

# %% 11.10 in flight for all
forgot = {"A": "in flight", "B": "in flight", "C": "in flight"}  # "in flight", "logits" or "buffers"
fixed = {
    "A": Layout.parse("dp2,pp16,tp4,zero1,sp,mb4"),
    "B": Layout.parse("pp2,tp16,sp,mb16"),
    "C": Layout.parse("dp16,pp2,tp2,zero1,sp,mb4"),
}

# %% 11.10 logits for all
forgot = {"A": "logits", "B": "logits", "C": "logits"}  # "in flight", "logits" or "buffers"
fixed = {
    "A": Layout.parse("dp2,pp16,tp4,zero1,sp,mb4"),
    "B": Layout.parse("pp2,tp16,sp,mb16"),
    "C": Layout.parse("dp16,pp2,tp2,zero1,sp,mb4"),
}

# %% 11.10 the plans as they were
forgot = {"A": "in flight", "B": "buffers", "C": "logits"}  # "in flight", "logits" or "buffers"
fixed = {
    "A": Layout.parse("dp2,pp16,tp4,zero1,sp,mb8"),
    "B": Layout.parse("pp2,tp16,sp,mb32"),
    "C": Layout.parse("dp16,pp2,tp2,zero1,sp,mb16"),
}

# %% 11.10 two fields of A: a smaller micro-batch, and recomputation
forgot = {"A": "in flight", "B": "buffers", "C": "logits"}  # "in flight", "logits" or "buffers"
fixed = {
    "A": Layout.parse("dp2,pp16,tp4,zero1,sp,mb4,full"),
    "B": Layout.parse("pp2,tp16,sp,mb16"),
    "C": Layout.parse("dp16,pp2,tp2,zero1,sp,mb4"),
}

# %% 11.10 B on half of the GPUs
forgot = {"A": "in flight", "B": "buffers", "C": "logits"}  # "in flight", "logits" or "buffers"
fixed = {
    "A": Layout.parse("dp2,pp16,tp4,zero1,sp,mb4"),
    "B": Layout.parse("tp16,sp,mb32"),
    "C": Layout.parse("dp16,pp2,tp2,zero1,sp,mb4"),
}

# %% 11.10 C: buffers
forgot = {"A": "in flight", "B": "buffers", "C": "buffers"}  # "in flight", "logits" or "buffers"
fixed = {
    "A": Layout.parse("dp2,pp16,tp4,zero1,sp,mb4"),
    "B": Layout.parse("pp2,tp16,sp,mb16"),
    "C": Layout.parse("dp16,pp2,tp2,zero1,sp,mb4"),
}

# %% 11.10 B in micro-batches of one: it fits, and takes too long
forgot = {"A": "in flight", "B": "buffers", "C": "logits"}  # "in flight", "logits" or "buffers"
fixed = {
    "A": Layout.parse("dp2,pp16,tp4,zero1,sp,mb4"),
    "B": Layout.parse("pp2,tp16,sp"),
    "C": Layout.parse("dp16,pp2,tp2,zero1,sp,mb4"),
}

# %% 11.3 attention's tensors as wide as the hidden state, whatever the heads add up to
others = software.kept_hidden - software.kept_outside_tp - 2  # tensors of all heads
inside = others * config.attention_width + keys + software.kept_ffn * width
=>
inside = (software.kept_hidden - software.kept_outside_tp - 2) * h + keys + software.kept_ffn * width
