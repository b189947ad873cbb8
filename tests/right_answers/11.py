"""Right answers in another style than the solutions, that the checks of notebook 11 must accept."""

# %% 11.1 a product, and two limits
def stride_of(layout, axis: str, order: tuple[str, ...]):
    inside = False
    stride = 1
    for each in order:
        if inside:
            stride = stride * np.asarray(getattr(layout, each))
        inside = inside or each == axis
    return np.asarray(stride)


def in_node(cluster: Cluster, size, stride) -> np.ndarray:
    return np.minimum(size, np.maximum(1, cluster.gpus_per_node // np.asarray(stride)))

# %% 11.2 one choice among the schedules
def in_flight(layout, m) -> np.ndarray:
    pp, v, m = np.asarray(layout.pp), np.asarray(layout.virtual), np.asarray(m)
    cases = [
        (is_schedule(layout, "afab"), m),
        (is_schedule(layout, "naive"), np.asarray(1)),
        (is_schedule(layout, "interleaved") & (v > 1), np.minimum(m, pp + (pp - 1) / v)),
        (is_schedule(layout, "zb-h2"), np.minimum(m, 2 * pp - 1)),
        (is_schedule(layout, "dualpipe"), pp + 1),
    ]
    held = np.minimum(m, pp)
    for chosen, number in cases[::-1]:
        held = np.where(chosen, number, held)
    return held


def bubble_share(layout, m) -> np.ndarray:
    pp, v, m = np.asarray(layout.pp), np.asarray(layout.virtual), np.asarray(m)
    others = np.maximum(1, pp - 1)
    lacking = np.maximum(2 * pp - 1 - m, 0)
    slots = {  # in units of t_f
        "naive": 3 * others * m,
        "interleaved": 3 * others / v,
        "zb-h1": pp - 1 + np.maximum(pp - m, 0),
        "zb-h2": pp - 1 + lacking // 2,
        "zb-v": np.maximum(lacking, (pp - 1) / 2),
        "dualpipe": pp - 2,
    }
    found = 3 * others
    for name, number in slots.items():
        found = np.where(is_schedule(layout, name), number, found)
    return found / (3 * others)

# %% 11.3 part by part
def kept_elements(config: ModelConfig, cluster: Cluster, layout, moe: dict | None = None) -> np.ndarray:
    kept, tp = cluster.software, np.asarray(layout.tp)
    if moe is None:
        width = config.ffn_hidden
    else:
        width = expert_sizes(config, moe)[0] / 3 / config.hidden
    norms = config.hidden * kept.kept_outside_tp / np.where(layout.sequence_parallel, tp, 1)
    keys_and_values = 2 * config.head_dim * np.maximum(config.kv_heads / tp, 1)
    queries = config.heads * config.head_dim * (kept.kept_hidden - kept.kept_outside_tp - 2) / tp
    return norms + keys_and_values + queries + kept.kept_ffn * width / tp

# %% 11.4 one collective, eight times
def tensor_parallel_time(cluster: Cluster, layout, size) -> np.ndarray:
    tp = np.asarray(layout.tp)
    bandwidth, _ = ring(cluster, tp, 1)
    sent = size - size / tp
    far = np.where(tp > cluster.gpus_per_node, tp - cluster.gpus_per_node, 0)
    one = sent / bandwidth + cluster.software.collective_s + far * cluster.software.ring_step_s
    return one * 8

# %% 11.5 stage by stage
def gradient_time(cluster: Cluster, layout, m, parameters, slot, others=0.0) -> np.ndarray:
    software = cluster.software
    zero, kept = np.asarray(layout.zero_stage), np.asarray(layout.gather_once)
    ranks = np.asarray(layout.dp) * np.asarray(layout.cp)
    bandwidth, far = replica_ring(cluster, layout)
    step_s = latency_steps(cluster, ranks) * np.where(far, software.gradient_step_s, software.collective_s)
    one_byte_s = parameters * (1 - 1 / ranks) / bandwidth

    def waits(bytes_each, rounds, overlap, part):
        return bytes_each * one_byte_s + rounds * step_s - overlap * part * rounds * slot

    backward = 2 / 3
    by_stage = [
        (zero == 0, waits(8, 1, software.overlap, backward)),
        (zero == 1, waits(6, 1, software.sharded_overlap, backward)),
        (zero == 2, waits(4 * m + 2, m, software.sharded_overlap, backward)),
        ((zero == 3) & kept, waits(6, 1, software.sharded_overlap, backward)),
        ((zero == 3) & ~kept, waits(8 * m, m, software.sharded_overlap, 1)),
    ]
    found = sum(np.where(chosen, seconds, 0) for chosen, seconds in by_stage)
    return np.maximum(found + others, 0)

# %% 11.6 collects by run
def cross_validate(runs: list[MeasuredRun], cluster: Cluster) -> Predicted:
    step_s, peak_bytes, risk = [0.0] * len(runs), [0.0] * len(runs), [0.0] * len(runs)
    for rows in cells(runs).values():
        constants = fit([runs[i] for i in range(len(runs)) if i not in rows], cluster)
        found = predict([runs[i] for i in rows], constants)
        for place, i in enumerate(rows):
            step_s[i], peak_bytes[i], risk[i] = found.step_s[place], found.peak_bytes[place], found.risk[place]
    return Predicted(np.array(step_s), np.array(peak_bytes), np.array(risk))

# %% 11.7 divisors of what is left, and the first rule first
def degrees(gpus: int) -> LayoutTable:
    def divisors(number):
        return [each for each in range(1, number + 1) if number % each == 0]

    rows = []
    for dp in divisors(gpus):
        for pp in divisors(gpus // dp):
            rows += [(dp, pp, cp, gpus // (dp * pp * cp)) for cp in divisors(gpus // (dp * pp))]
    table = np.array(rows)
    return LayoutTable(len(rows), **{axis: table[:, place] for place, axis in enumerate(("dp", "pp", "cp", "tp"))})


def first_reason(rules: dict[str, np.ndarray], reasons: list[str]) -> np.ndarray:
    found = np.zeros(np.broadcast_shapes(*(np.shape(holds) for holds in rules.values())), dtype=int)
    for reason, holds in rules.items():
        if reason not in reasons:
            reasons.append(reason)
        found = np.where((found == 0) & holds, reasons.index(reason), found)
    return found

# %% 11.8 by permutations
import itertools


def changes(layout: Layout) -> dict[str, Layout]:
    tried = []
    for less, more in itertools.permutations(("dp", "pp", "cp", "tp"), 2):
        if (value := getattr(layout, less)) % 2 == 0:
            tried.append({less: value // 2, more: 2 * getattr(layout, more)})
    tried += [{"micro_batch": size} for size in (2 * layout.micro_batch, layout.micro_batch // 2) if size]
    tried += [{"zero_stage": stage} for stage in (0, 1, 2, 3)]
    tried += [{"recompute": mode} for mode in ("none", "full")]
    tried += [{"schedule": name} for name in ("1f1b", "interleaved", "zb-h1")]
    found = {}
    for fields in tried:
        one = dataclasses.replace(layout, **fields)
        schedule = "1f1b" if one.pp == 1 else one.schedule
        kept = one.zero_stage == 3 and one.pp > 1
        what = ", ".join(f"{name} {value}" for name, value in fields.items())
        found[what] = dataclasses.replace(one, sequence_parallel=one.tp > 1, gather_once=kept, schedule=schedule)
    return found

# %% 11.9 by fields
by_hand = {
    "A": Layout(dp=64, zero_stage=3),
    "B": Layout(dp=16, pp=4, tp=4, sequence_parallel=True, zero_stage=1, schedule="zb-h1"),
    "C": Layout(dp=2, cp=32, zero_stage=3),
}

# %% 11.10 by changes of one field
forgot = dict(A="in flight", B="buffers", C="logits")
fixed = dict(
    A=Layout(dp=2, pp=16, tp=4, zero_stage=1, sequence_parallel=True, micro_batch=4),
    B=Layout(pp=2, tp=16, sequence_parallel=True, micro_batch=16),
    C=Layout(dp=16, pp=2, tp=2, zero_stage=1, sequence_parallel=True, micro_batch=4),
)
