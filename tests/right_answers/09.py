"""Right answers in another style than the solutions, that the checks of notebook 09 must accept."""

# %% 09.1 sizes first
def split_layers(layers: int, stages: int) -> list[range]:
    things = layers + 2
    if stages < 1 or stages > things:
        raise ValueError(f"{stages} stages for {things} things, the embedding and the head among them: make it 1 to {things}")
    sizes = [things // stages] * stages
    more = things % stages
    first_larger = (stages - more + 1) // 2
    for stage in range(first_larger, first_larger + more):
        sizes[stage] += 1
    found, begin = [], -1  # the embedding comes before layer 0
    for size in sizes:
        found.append(range(max(begin, 0), min(begin + size, layers)))
        begin += size
    return found

# %% 09.2 a new object for each stage
def split_stages(model: nn.Module, p: int, v: int = 1) -> list[nn.Module]:
    if p < 1 or v < 1:
        raise ValueError(f"p = {p}, v = {v}: ranks and stages per rank must be 1 or more")
    count = p * v
    parts = split_layers(len(model.blocks), count)
    tied = model.head.weight is model.embedding.weight
    stages = []
    for number in range(count):
        stage = type(model).__new__(type(model))
        for key, value in model.__dict__.items():
            stage.__dict__[key] = value.copy() if isinstance(value, dict) else value
        stage.__dict__["_modules"] = {}
        first, final = number == 0, number == count - 1
        blocks = nn.ModuleList()
        for layer in parts[number]:
            blocks.add_module(f"{layer}", model.blocks[layer])
        stage.embedding = model.embedding if first else None
        stage.blocks = blocks
        stage.norm = model.norm if final else None
        stage.head = model.head if final else None
        stages.append(stage)
    if tied and count > 1:
        placement_of(model.head.weight).stages = 0, count - 1
    return stages

# %% 09.3 by the type of x
def __init__(self: StagePass, stage: nn.Module, x: torch.Tensor, output_fn: Callable, *args):
    self.x = x.detach()
    if self.x.is_floating_point():
        self.x.requires_grad = True
    result = output_fn(self.run(stage, *args))
    self.edge = get_gradient_edge(result) if result.requires_grad else None
    self.out = result.detach()


def backward(self: StagePass, gradient: torch.Tensor) -> torch.Tensor | None:
    edge, self.edge = self.edge, None
    if edge is None:
        return None
    torch.autograd.backward(edge, gradient)
    found = self.x.grad
    self.x.grad = None
    return found

# %% 09.4 one list, forwards taken when due
def steady_1f1b(forwards: list[Action], backwards: list[list[Action]], warmup_microbatches: int) -> list[Action]:
    count = len(forwards)
    ahead = min(count, warmup_microbatches)
    order = list(forwards[:ahead])
    for number in range(count):
        if number + ahead < count:
            order.append(forwards[number + ahead])
        order += backwards[number]
    return order


def one_f_one_b(p: int, m: int) -> Schedule:
    check_sizes(p, m)
    schedule = []
    for rank in range(p):
        forwards = [Action("F", rank, number) for number in range(m)]
        backwards = [[Action("B", rank, number)] for number in range(m)]
        schedule.append(steady_1f1b(forwards, backwards, warmup_microbatches=p - rank - 1))
    return schedule

# %% 09.5 what is wanted, in order
def missing(self: Progress, action: Action) -> tuple[bool, int, int] | None:
    kind, stage, micro_batch = action
    wanted = []
    if kind == "F":
        if stage:
            wanted.append((True, stage - 1, micro_batch))
    elif kind == "W":
        wanted.append((False, stage, micro_batch))
    else:
        wanted.append((True, stage, micro_batch))
        if stage < self.last:
            wanted.append((False, stage + 1, micro_batch))
    for forward, of_stage, number in wanted:
        done = self.forward if forward else self.backward
        if not done[of_stage * self.m + number]:
            return forward, of_stage, number
    return None

# %% 09.6 counts by stage
def validate(schedule: Schedule, m: int | None = None) -> list[int]:
    actions = [(rank, action) for rank, each in enumerate(schedule) for action in each]
    if not actions:
        raise ValueError("there is no action in the schedule")
    for rank, (kind, stage, number) in actions:
        if stage < 0 or number < 0:
            raise ValueError(f"rank {rank}: {kind} of stage {stage}, micro-batch {number}: they count from 0")
    stages = max(action.stage for _, action in actions) + 1
    largest = max(action.micro_batch for _, action in actions) + 1
    m = largest if m is None else m
    table = {}
    for rank, (kind, stage, number) in actions:
        kinds, ranks = table.setdefault((stage, number), ([], set()))
        kinds.append(kind)
        ranks.add(rank)
    for stage in range(stages):
        for number in range(max(m, largest)):
            kinds, ranks = table.get((stage, number), ([], set()))
            if number >= m or sorted(kinds) not in (["B", "F"], ["F", "I", "W"]):
                raise ValueError(f"stage {stage}, micro-batch {number} of {m}: {sorted(kinds)} instead of F, B or F, I, W")
            if len(ranks) != 1:
                raise ValueError(f"stage {stage}, micro-batch {number}: more than one rank, {sorted(ranks)}")
    collections.deque(play(schedule), maxlen=0)  # a deadlock raises
    most = []
    for each in schedule:
        held = highest = 0
        for action in each:
            held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            highest = max(highest, held)
        most.append(highest)
    return most

# %% 09.7 the source first
duration, index = duration + times[kind][stage], stage * m + micro_batch
=>
duration, index = duration + times[kind][stage], stage * m + micro_batch
source = None
---
    if stage == 0:
        continue
    source, ready = index - m, ended_f[index - m]
elif kind == "W" or stage == stages - 1:
    continue
else:
    source, ready = index + m, ended_b[index + m]
ready = ready if rank_of[source] == rank else ready + t_comm
start = ready if ready > start else start
=>
    if stage > 0:
        source, ended = index - m, ended_f
elif kind != "W" and stage < stages - 1:
    source, ended = index + m, ended_b
if source is not None:
    arrives = ended[source] + (t_comm if rank_of[source] != rank else 0)
    start = max(start, arrives)

# %% 09.8 counted up
# Set micro_batches and slower.
micro_batches = next(m for m in range(1, 1000) if 10 * 15 <= m + 15)
slower = 1 - 39 / 47

# %% 09.9 case by case
def run(self: PipelineRunner, action: Action, step: Step) -> None:
    kind, stage, number = action
    first, final = stage == 0, stage == self.last

    def send_back(gradient):
        if not first:
            step.p2p.post_send("B", stage - 1, number, gradient)

    match kind:
        case "F":
            x = step.inputs[number] if first else step.p2p.wait_recv("F", stage, number)
            cls = SplitPass if (stage, number) in self.split else StagePass
            with step.autocast:
                passed = cls(self.stages[f"{stage}"], x, self.output_fn(step, stage, number), *step.args[number])
            step.passes[stage, number] = passed
            out, passed.out = passed.out, None
            if final:
                step.loss.add_(out)
            else:
                step.p2p.post_send("F", stage + 1, number, out)
        case "W":
            passed = step.passes.pop((stage, number))
            passed.weight_gradients()
        case "I":
            gradient = step.loss.new_ones(()) if final else step.p2p.wait_recv("B", stage, number)
            send_back(step.passes[stage, number].input_gradient(gradient))
        case "B":
            gradient = step.loss.new_ones(()) if final else step.p2p.wait_recv("B", stage, number)
            send_back(step.passes.pop((stage, number)).backward(gradient))

# %% 09.10 run by run
def interleaved(p: int, m: int, v: int, run: int | None = None) -> Schedule:
    check_sizes(p, m, v)
    run = p if run is None else run
    if v == 1:
        return one_f_one_b(p, m)
    if run < p or m % run:
        raise ValueError(f"interleaved: run = {run} must be at least p = {p}, and divide m = {m}")
    def order(chunks):
        """(chunk, micro-batch), a run of each chunk after the other."""
        return [(chunk, first + i) for first in range(0, m, run) for chunk in chunks for i in range(run)]

    schedule = []
    for rank in range(p):
        forwards = [Action("F", rank + p * chunk, i) for chunk, i in order(list(range(v)))]
        backwards = [[Action("B", rank + p * chunk, i)] for chunk, i in order(list(range(v))[::-1])]
        schedule.append(steady_1f1b(forwards, backwards, 2 * (p - rank - 1) + run * (v - 1)))
    return schedule

# %% 09.11 one gradient at a time
class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype), bias if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        found = [None, None, None]
        if ctx.needs_input_grad[0]:
            found[0] = torch.matmul(gradient, weight.to(gradient.dtype))
        if any(ctx.needs_input_grad[1:]):
            flat = gradient.reshape(-1, gradient.shape[-1])
            if ctx.needs_input_grad[1]:
                found[1] = torch.mm(flat.t(), x.reshape(-1, x.shape[-1]))
            if ctx.needs_input_grad[2]:
                found[2] = flat.sum(dim=0)
        return tuple(found)

# %% 09.12 names what is asked
@torch.no_grad()
def weight_gradients(self: SplitPass) -> None:
    weights = {proxy: weight for proxy, weight in zip(self.proxies, self.weights)}
    uses = {}
    for deferred in self.deferred:
        for _, behind in deferred.edges.values():
            uses[behind] = uses.get(behind, 0) + 1
    while len(self.deferred) > 0:
        deferred = self.deferred.pop()
        gradients = deferred.run()
        for number in deferred.edges:
            gradient, (edge, behind) = gradients[number], deferred.edges[number]
            if gradient is None:
                continue
            target = edge
            if hasattr(edge.node, "variable"):
                gradient = gradient.to(behind.dtype)
                if uses[behind] == 1 and behind.grad is None:
                    target = weights[behind]
            torch.autograd.backward(target, gradient, retain_graph=True)
    for proxy in weights:
        if proxy.grad is not None:
            torch.autograd.backward(weights[proxy], proxy.grad)
    self.proxies, self.weights = (), ()

# %% 09.13 the W's that are due
def delay_weight_grads(p: int, m: int, k: int) -> Schedule:
    check_sizes(p, m)
    schedule = []
    for rank in range(p):
        waiting, backwards = [], []
        for i in range(m):
            waiting.append(Action("W", rank, i))
            backwards.append([Action("I", rank, i)])
            if len(waiting) > k * rank:
                backwards[-1].append(waiting.pop(0))
        forwards = [Action("F", rank, i) for i in range(m)]
        schedule.append(steady_1f1b(forwards, backwards, k * (p - rank - 1)) + waiting)
    return schedule

# %% 09.14 one kind after the other
def options(self: Greedy, rank: int) -> dict:
    done, now = self.done[rank], self.free[rank]
    possible = {}
    held = done["F"] - done["W"]
    may_forward = done["F"] < self.m and held < self.live and done["F"] - done["I"] < self.max_lead[rank]
    for kind, may in (("F", may_forward), ("I", done["I"] < done["F"])):
        arrival = self.input_ready(kind, rank, done[kind]) if may else None
        if arrival is not None:
            possible[kind] = max(arrival, now)
    if done["W"] < done["I"]:
        idle = min(possible.values()) - now if possible else math.inf
        if held >= self.live or (idle > 0 and idle >= self.fill * self.times["W"][rank]):
            possible["W"] = now
    return possible

# %% 09.15 sets of stages
def owner_ranks(schedule: Schedule, stages: tuple[int, ...]) -> tuple[int, ...]:
    found = []
    for rank in range(len(schedule)):
        if {action.stage for action in schedule[rank]} & set(stages):
            found.append(rank)
    return tuple(found)


def final_backwards(stages: nn.ModuleDict, actions: list[Action]) -> set[int]:
    ends = {}
    for place, action in enumerate(actions):
        if action.kind in ("B", "W"):
            ends[action.stage] = place
    own = {stage: set(stages[str(stage)].parameters()) for stage in ends}
    found = set()
    for stage, place in ends.items():
        shared = [ends[other] for other in ends if own[other] & own[stage]]
        if place == max(shared + [place]):
            found.add(place)
    return found

# %% 09.16 by keyword
# Set who, a dict of four letters.
who = dict(A="scaled", B="cut", C="lost", D="sound")

# %% 09.17 two times
def pipeline_ratio(hidden: int, layers: float, bandwidth: float, peak: float, number_bytes: float = 2) -> float:
    sent_s = hidden * number_bytes / bandwidth
    computed_s = 2 * 16 * hidden**2 * layers / peak
    return sent_s / computed_s

# %% 09.12 two loops, and a call for each gradient
@torch.no_grad()
def weight_gradients(self: SplitPass) -> None:
    for deferred in self.deferred:
        found = deferred.run()
        for i, (edge, _) in deferred.edges.items():
            if found[i] is not None:
                torch.autograd.backward([edge], [found[i]], retain_graph=True)
    self.deferred = []
    for weight, proxy in zip(self.weights, self.proxies, strict=True):
        if proxy.grad is not None:
            torch.autograd.backward([weight], [proxy.grad])
