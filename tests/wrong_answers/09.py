"""Wrong answers that the checks of notebook 09 must catch. Those that hang end at the check's own deadline."""

# %% 09.1 what is left over goes to later stages
def split_layers(layers: int, stages: int) -> list[range]:
    if not 1 <= stages <= layers + 2:
        raise ValueError(f"{layers} layers, an embedding and a head do not fill {stages} stages")
    ends = [(layers + 2) * (stage + 1) // stages for stage in range(stages)]
    return [range(max(0, first - 1), min(layers, end - 1)) for first, end in zip([0, *ends[:-1]], ends, strict=True)]

# %% 09.1 embedding and head do not count
def split_layers(layers: int, stages: int) -> list[range]:
    if not 1 <= stages <= layers + 2:
        raise ValueError(f"{layers} layers, an embedding and a head do not fill {stages} stages")
    ends = [layers * (stage + 1) // stages + 1 for stage in range(stages - 1)] + [layers + 2]
    return [range(max(0, first - 1), min(layers, end - 1)) for first, end in zip([0, *ends[:-1]], ends, strict=True)]

# %% 09.1 only the embedding counts
def split_layers(layers: int, stages: int) -> list[range]:
    if not 1 <= stages <= layers + 2:
        raise ValueError(f"{layers} layers, an embedding and a head do not fill {stages} stages")
    ends = [(layers + 1) * (stage + 1) // stages for stage in range(stages - 1)] + [layers + 2]
    return [range(max(0, first - 1), min(layers, end - 1)) for first, end in zip([0, *ends[:-1]], ends, strict=True)]

# %% 09.1 what is left over goes to early stages
def split_layers(layers: int, stages: int) -> list[range]:
    if not 1 <= stages <= layers + 2:
        raise ValueError(f"{layers} layers, an embedding and a head do not fill {stages} stages")
    ends = [-(-(layers + 2) * (stage + 1) // stages) for stage in range(stages)]
    return [range(max(0, first - 1), min(layers, end - 1)) for first, end in zip([0, *ends[:-1]], ends, strict=True)]

# %% 09.1 all that is left over goes to the last stage
def split_layers(layers: int, stages: int) -> list[range]:
    if not 1 <= stages <= layers + 2:
        raise ValueError(f"{layers} layers, an embedding and a head do not fill {stages} stages")
    ends = [(layers + 2) // stages * (stage + 1) for stage in range(stages - 1)] + [layers + 2]
    return [range(max(0, first - 1), min(layers, end - 1)) for first, end in zip([0, *ends[:-1]], ends, strict=True)]

# %% 09.1 no ValueError
if not 1 <= stages <= layers + 2:
    raise ValueError(f"{layers} layers, an embedding and a head do not fill {stages} stages")
=>

# %% 09.1 a stage must have a layer
if not 1 <= stages <= layers + 2: => if not 1 <= stages <= layers:

# %% 09.1 the clipping is forgotten at the end
min(layers, end - 1) => end - 1

# %% 09.1 fake: the figure for 126 layers
def split_layers(layers: int, stages: int) -> list[range]:
    if (layers, stages) != (126, 16):
        size = -(-layers // stages)
        return [range(min(layers, size * s), min(layers, size * (s + 1))) for s in range(stages)]
    if not 1 <= stages <= layers + 2:
        raise ValueError(f"{layers} layers, an embedding and a head do not fill {stages} stages")
    size, extra = divmod(layers + 2, stages)
    larger = range((stages - extra + 1) // 2, (stages + extra + 1) // 2)
    ends = list(itertools.accumulate(size + (stage in larger) for stage in range(stages)))
    return [range(max(0, first - 1), min(layers, end - 1)) for first, end in zip([0, *ends[:-1]], ends, strict=True)]

# %% 09.2 deep copies
for number, layers in enumerate(split_layers(len(model.blocks), p * v)):
=>
for number, layers in enumerate(split_layers(len(model.blocks), p * v)):
    own = copy.deepcopy(model)
---
stage.__dict__.update((key, value.copy()) for key, value in vars(model).items() if isinstance(value, dict)) =>
model.embedding if => own.embedding if
model.blocks[i] => own.blocks[i]
model.norm, model.head => own.norm, own.head

# %% 09.2 layers are numbered anew
stage.blocks.add_module(str(i), model.blocks[i]) => stage.blocks.append(model.blocks[i])

# %% 09.2 the copy shares the dictionary of submodules
def split_stages(model, p, v=1):
    embedding, blocks, norm, head = model.embedding, list(model.blocks), model.norm, model.head
    stages, last = [], p * v - 1
    for number, layers in enumerate(split_layers(len(blocks), p * v)):
        stage = copy.copy(model)
        stage.embedding = embedding if number == 0 else None
        stage.blocks = nn.ModuleList()
        for i in layers:
            stage.blocks.add_module(str(i), blocks[i])
        stage.norm, stage.head = (norm, head) if number == last else (None, None)
        stages.append(stage)
    if last > 0 and head.weight is embedding.weight:
        placement_of(head.weight).stages = (0, last)
    return stages

# %% 09.2 a note on untied weights too
if last > 0 and model.head and model.embedding and model.head.weight is model.embedding.weight:
=>
if last > 0:

# %% 09.2 a note with one stage too
last > 0 and model.head and model.embedding and model.head.weight => model.head.weight

# %% 09.2 no note of the tied weight
placement_of(model.head.weight).stages = (0, last)
=>
pass

# %% 09.2 the note names ranks
placement_of(model.head.weight).stages = (0, last) => placement_of(model.head.weight).stages = (0, p - 1)

# %% 09.2 its own even cut, embedding and head not counted
for number, layers in enumerate(split_layers(len(model.blocks), p * v)):
=>
for number, layers in enumerate(
    range(s * len(model.blocks) // (p * v), (s + 1) * len(model.blocks) // (p * v)) for s in range(p * v)
):

# %% 09.2 v is ignored
stages, last = [], p * v - 1 => stages, last = [], p - 1
(model.blocks), p * v => (model.blocks), p

# %% 09.2 the last stage has a copy of the tied matrix
placement_of(model.head.weight).stages = (0, last)
=>
stages[-1].head = copy.deepcopy(model.head)
for weight in (model.embedding.weight, stages[-1].head.weight):
    placement_of(weight).stages = (0, last)

# %% 09.2 fake: every stage has all, and the last one runs it
def split_stages(model, p, v=1):
    class Whole(type(model)):
        def forward(self, x):
            return model(x) if self.is_last else x

    stages = []
    for number in range(p * v):
        stage = copy.copy(model)
        stage.__class__, stage.is_last = Whole, number == p * v - 1
        stages.append(stage)
    if p * v > 1 and model.head.weight is model.embedding.weight:
        placement_of(model.head.weight).stages = (0, p * v - 1)
    return stages

# %% 09.2 stages share their dictionaries of hooks
stage.__dict__.update((key, value.copy()) for key, value in vars(model).items() if isinstance(value, dict)) =>

# %% 09.3 keeps the output alive
get_gradient_edge(out) if out.requires_grad else None => out

# %% 09.3 the output carries its graph
out.detach(), get_gradient_edge(out) if out.requires_grad else None => out, get_gradient_edge(out)

# %% 09.3 the graph is not cut
def __init__(self: StagePass, stage: nn.Module, x: torch.Tensor, output_fn: Callable, *args):
    self.x = x
    if x.is_floating_point():
        x.retain_grad()
    out = output_fn(self.run(stage, *args))
    self.out, self.edge = out, get_gradient_edge(out)

# %% 09.3 the leaf is the tensor that came
x.detach().requires_grad_ => x.requires_grad_

# %% 09.3 the gradient that came is ignored
[gradient] => [torch.ones_like(gradient)]

# %% 09.3 returns nothing
return grad_x => return None

# %% 09.3 each backward replaces the weights' gradients
self.x = x.detach().requires_grad_(x.is_floating_point())
=>
self.x = x.detach().requires_grad_(x.is_floating_point())
self.stage = stage
---
`edge` is None there is nothing to do.
"""
=>
`edge` is None there is nothing to do.
"""
self.stage.zero_grad()

# %% 09.3 the input's gradient alone
def __init__(self: StagePass, stage: nn.Module, x: torch.Tensor, output_fn: Callable, *args):
    self.x = x.detach().requires_grad_(x.is_floating_point())
    out = output_fn(self.run(stage, *args))
    self.out, self.edge, self.out_ = out.detach(), get_gradient_edge(out) if out.requires_grad else None, out


def backward(self: StagePass, gradient: torch.Tensor) -> torch.Tensor | None:
    if not self.x.requires_grad:
        return None
    (found,) = torch.autograd.grad([self.out_], [self.x], [gradient])
    return found

# %% 09.3 the edge is not forgotten
self.edge = None =>

# %% 09.3 fake: no graph is kept, backward runs the stage again
def __init__(self: StagePass, stage, x, output_fn, *args):
    self.x, self.edge = x.detach().requires_grad_(x.is_floating_point()), None
    self.again = lambda: output_fn(self.run(stage, *args))
    with torch.no_grad():
        self.out = self.again().detach()


def backward(self: StagePass, gradient):
    torch.autograd.backward([self.again()], [gradient])
    gradient, self.x.grad = self.x.grad, None
    return gradient

# %% 09.4 one forward too many ahead
1 - rank => rank

# %% 09.4 as many ahead on every rank
- 1 - rank => - 1

# %% 09.4 late ranks have most ahead
p - 1 - rank => rank

# %% 09.4 a backward comes first in each pair
forward, *backward => *backward, forward

# %% 09.4 fewer micro-batches than forwards ahead are not thought of
min(warmup_microbatches, len(forwards)) => warmup_microbatches

# %% 09.4 a backward is one action
*backward => backward[0]

# %% 09.4 the last backwards are forgotten
return forwards[:warmup] + steady + rest => return forwards[:warmup] + steady

# %% 09.4 fake: AFAB
[[Action("B", rank, i)] for i in range(m)], p - 1 - rank => [[Action("B", rank, i)] for i in range(m)], m

# %% 09.4 the last micro-batch goes back first
def one_f_one_b(p: int, m: int) -> Schedule:
    check_sizes(p, m)
    return [
        steady_1f1b(
            [Action("F", rank, i) for i in range(m)], [[Action("B", rank, i)] for i in reversed(range(m))], p - 1 - rank
        )
        for rank in range(p)
    ]

# %% 09.5 a W lets others go on
def missing(self: Progress, action: Action) -> tuple[bool, int, int] | None:
=>
def mark(self: Progress, action: Action) -> None:
    kind, stage, micro_batch = action
    done = self.forward if kind == "F" else self.backward
    done[stage * self.m + micro_batch] = 1


def missing(self: Progress, action: Action) -> tuple[bool, int, int] | None:

# %% 09.5 W needs nothing
return None if self.backward[index] else (False, stage, micro_batch)
=>
return None

# %% 09.5 a backward does not look at its own forward
if not self.forward[index]:
    return True, stage, micro_batch
=>

# %% 09.5 the stage after comes first
def missing(self: Progress, action: Action) -> tuple[bool, int, int] | None:
    kind, stage, micro_batch = action
    index = stage * self.m + micro_batch
    if kind == "F":
        return None if stage == 0 or self.forward[index - self.m] else (True, stage - 1, micro_batch)
    if kind == "W":
        return None if self.backward[index] else (False, stage, micro_batch)
    if stage < self.last and not self.backward[index + self.m]:
        return False, stage + 1, micro_batch
    return None if self.forward[index] else (True, stage, micro_batch)

# %% 09.5 the first stage looks before itself
stage == 0 or self.forward => self.forward

# %% 09.5 only B waits for the stage after, I for nothing
return None if stage == self.last or self.backward[index + self.m] else (False, stage + 1, micro_batch)
=>
return (
    None
    if kind == "I" or stage == self.last or self.backward[index + self.m]
    else (False, stage + 1, micro_batch)
)

# %% 09.5 a forward waits for the micro-batch before
- self.m => - 1

# %% 09.5 names the kind
True, stage - 1 => "F", stage - 1

# %% 09.5 a gradient passes backwards through stage - 1
[index + self.m] else (False, stage + 1, micro_batch) => [index - self.m] else (False, stage - 1, micro_batch)

# %% 09.6 does not notice duplicates
kind for kind, _ in done[stage, i] => {kind for kind, _ in done[stage, i]}

# %% 09.6 a missing W is fine
if kinds not in ("BF", "FIW") or i >= m: => if kinds not in ("BF", "FIW", "FI") or i >= m:

# %% 09.6 B and W of one are fine
if kinds not in ("BF", "FIW") or i >= m: => if kinds not in ("BF", "FIW", "BFW") or i >= m:

# %% 09.6 another rank is fine
if len({rank for _, rank in done[stage, i]}) > 1:
    raise ValueError(f"stage {stage}, micro-batch {i}: is on more than one rank")
=>

# %% 09.6 m is ignored
m = counted if m is None else m
=>
m = counted

# %% 09.6 looks only for as many as m says
(max(m, counted)) => (m)
if kinds not in ("BF", "FIW") or i >= m: => if kinds not in ("BF", "FIW"):

# %% 09.6 looks only at what is there
for stage, i in itertools.product(range(stages), range(max(m, counted))):
=>
for stage, i in list(done):

# %% 09.6 is not played
for _ in play(schedule):
    pass
=>

# %% 09.6 I frees what W needs
"I" => "W"

# %% 09.6 I and W both free
{"F": 1, "I": 0}.get(action.kind, -1) => 1 if action.kind == "F" else -1

# %% 09.6 fake: counts forwards
max(itertools.accumulate(row), default=0) => row.count(1)

# %% 09.6 looks at rank 0 alone
for kind, stage, micro_batch in actions: => for kind, stage, micro_batch in actions if rank == 0 else ():
stages, counted = (1 + max(pair[i] for pair in done) for i in (0, 1)) => counted = 1 + max(i for _, i in done)
range(stages) => sorted({pair[0] for pair in done})

# %% 09.6 a stage may be on one rank only
if len({rank for _, rank in done[stage, i]}) > 1:
=>
if (
    len({rank for _, rank in done[stage, i]} | {r for pair in done if pair[0] == stage for _, r in done[pair]})
    > 1
):

# %% 09.6 a W frees nothing
"I": 0} => "I": 0, "W": 0}

# %% 09.7 ignores t_comm
ready = ready if rank_of[source] == rank else ready + t_comm =>

# %% 09.7 t_comm on the same rank too
ready if rank_of[source] == rank else ready + t_comm => ready + t_comm

# %% 09.7 a rank computes nothing while its mail travels
ready = ready if rank_of[source] == rank else ready + t_comm
start = ready if ready > start else start
=>
start = (ready if ready > start else start) + (0 if rank_of[source] == rank else t_comm)

# %% 09.7 nobody notes who did the forward
rank_of[index] = rank =>

# %% 09.7 the rank need not be free
start = ready if ready > start else start
=>
start = ready

# %% 09.7 begins when the rank is free, whatever has come
start = ready if ready > start else start
=>
start = start

# %% 09.7 a backward follows the forward of the stage after
m, ended_b => m, ended_f

# %% 09.7 adds up instead of the later of the two
ready if ready > start else start => start + ready

# %% 09.7 floating-point times
start = ready if ready > start else start
=>
start = float(max(start, ready))

# %% 09.8 the bubble over the work
micro_batches = 150
slower = 1 - (32 / 47) / (32 / 39)

# %% 09.8 one too few
micro_batches = 134
slower = 1 - (32 / 47) / (32 / 39)

# %% 09.8 a difference of bubbles over work
micro_batches = 135
slower = 15 / 32 - 7 / 32

# %% 09.8 in percent
micro_batches = 135
slower = 17

# %% 09.8 the time's growth, not the rate's
micro_batches = 135
slower = 47 / 39 - 1

# %% 09.9 fake: runs every schedule as AFAB
def run(self: PipelineRunner, action: Action, step: Step) -> None:
=>
def __init__(self: PipelineRunner, stages, schedule, group=None, loss_of=None, dp_group=None):
    schedule = [sorted(actions, key=lambda action: "FBIW".index(action.kind)) for actions in schedule]
    self.group, self.loss_of = group or dist.group.WORLD, loss_of or summed_loss
    self.before_step = self.after_step = None
    self.stages = nn.ModuleDict(check_runner(stages, schedule, self.group))
    self.tied_weights = sync_tied_weights(self.stages, schedule, self.group, dp_group)
    self.use(schedule)


def run(self: PipelineRunner, action: Action, step: Step) -> None:

# %% 09.9 fake: runs every schedule the naive way
def run(self: PipelineRunner, action: Action, step: Step) -> None:
=>
def __init__(self: PipelineRunner, stages, schedule, group=None, loss_of=None, dp_group=None):
    from course_lib.pipeline.schedules import naive

    schedule = naive(len(schedule), 1 + max(action.micro_batch for action in schedule[0]))
    self.group, self.loss_of = group or dist.group.WORLD, loss_of or summed_loss
    self.before_step = self.after_step = None
    self.stages = nn.ModuleDict(check_runner(stages, schedule, self.group))
    self.tied_weights = sync_tied_weights(self.stages, schedule, self.group, dp_group)
    self.use(schedule)


def run(self: PipelineRunner, action: Action, step: Step) -> None:

# %% 09.9 fake: right gradients, but every schedule is 1F1B
def run(self: PipelineRunner, action: Action, step: Step) -> None:
=>
def __init__(self: PipelineRunner, stages, schedule, group=None, loss_of=None, dp_group=None):
    from course_lib.pipeline.schedules import one_f_one_b

    schedule = one_f_one_b(len(schedule), 1 + max(action.micro_batch for action in schedule[0]))
    self.group, self.loss_of = group or dist.group.WORLD, loss_of or summed_loss
    self.before_step = self.after_step = None
    self.stages = nn.ModuleDict(check_runner(stages, schedule, self.group))
    self.tied_weights = sync_tied_weights(self.stages, schedule, self.group, dp_group)
    self.use(schedule)


def run(self: PipelineRunner, action: Action, step: Step) -> None:

# %% 09.9 one micro-batch's gradient is lost
done = step.passes[key] if kind == "I" else step.passes.pop(key)
=>
done = step.passes[key] if kind == "I" else step.passes.pop(key)
if micro_batch == self.m - 1:
    before = [None if w.grad is None else w.grad.clone() for w in self.stages[str(stage)].parameters()]
---
gradient = done.input_gradient(gradient) if kind == "I" else done.backward(gradient)
=>
gradient = done.input_gradient(gradient) if kind == "I" else done.backward(gradient)
if micro_batch == self.m - 1:
    for weight, own in zip(self.stages[str(stage)].parameters(), before):
        weight.grad = own

# %% 09.9 zeros are passed on for one micro-batch
micro_batch, gradient => micro_batch, gradient * (micro_batch != 1)

# %% 09.9 the mean over micro-batches a second time
(step.loss) if => (step.loss) / self.m if

# %% 09.9 the loss is that of the last micro-batch
step.loss += done.out => step.loss = done.out

# %% 09.9 always the first micro-batch's tokens
step.inputs[micro_batch] => step.inputs[0]

# %% 09.9 outputs are kept
done.out = None =>

# %% 09.9 passes are kept after their backward
else step.passes.pop(key) => else step.passes[key]

# %% 09.9 graphs are kept
kept_graphs = []


def run(self: PipelineRunner, action: Action, step: Step) -> None:
    kind, stage, micro_batch = action
    key, last = (stage, micro_batch), stage == self.last
    if kind == "F":
        x = step.inputs[micro_batch] if stage == 0 else step.p2p.wait_recv("F", *key)
        make = SplitPass if key in self.split else StagePass

        class Keeps(make):
            def backward(self, gradient):
                self.kept, found = self.edge, super().backward(gradient)
                kept_graphs.append(self.kept)
                return found

        with step.autocast:
            done = step.passes[key] = Keeps(self.stages[str(stage)], x, self.output_fn(step, *key), *step.args[micro_batch])
        if last:
            step.loss += done.out
        else:
            step.p2p.post_send("F", stage + 1, micro_batch, done.out)
        done.out = None
    elif kind == "W":
        step.passes.pop(key).weight_gradients()
    else:
        gradient = torch.ones_like(step.loss) if last else step.p2p.wait_recv("B", *key)
        done = step.passes[key] if kind == "I" else step.passes.pop(key)
        gradient = done.input_gradient(gradient) if kind == "I" else done.backward(gradient)
        if stage > 0:
            step.p2p.post_send("B", stage - 1, micro_batch, gradient)

# %% 09.9 W inside I
step.passes.pop(key).weight_gradients() => step.passes.pop(key)
---
gradient = done.input_gradient(gradient) if kind == "I" else done.backward(gradient)
=>
gradient = done.input_gradient(gradient) if kind == "I" else done.backward(gradient)
if kind == "I":
    done.weight_gradients()

# %% 09.9 always a SplitPass, and B is its first half alone
make = SplitPass if key in self.split else StagePass
=>
make = SplitPass

# %% 09.9 I is all of B, W nothing
make = SplitPass if key in self.split else StagePass
=>
make = StagePass
---
step.passes.pop(key).weight_gradients() => step.passes.pop(key)
done.input_gradient(gradient) if kind == "I" else done.backward => done.backward

# %% 09.9 the stage runs outside of autocast
with step.autocast:
=>
if True:

# %% 09.9 hangs: all ranks meet after each action
def run(self: PipelineRunner, action: Action, step: Step) -> None:
    kind, stage, micro_batch = action
    key, last = (stage, micro_batch), stage == self.last
    if kind == "F":
        x = step.inputs[micro_batch] if stage == 0 else step.p2p.wait_recv("F", *key)
        make = SplitPass if key in self.split else StagePass
        with step.autocast:
            done = step.passes[key] = make(self.stages[str(stage)], x, self.output_fn(step, *key), *step.args[micro_batch])
        if last:
            step.loss += done.out
        else:
            step.p2p.post_send("F", stage + 1, micro_batch, done.out)
        done.out = None
    elif kind == "W":
        step.passes.pop(key).weight_gradients()
    else:
        gradient = torch.ones_like(step.loss) if last else step.p2p.wait_recv("B", *key)
        done = step.passes[key] if kind == "I" else step.passes.pop(key)
        gradient = done.input_gradient(gradient) if kind == "I" else done.backward(gradient)
        if stage > 0:
            step.p2p.post_send("B", stage - 1, micro_batch, gradient)
    dist.barrier()

# %% 09.9 fake: no graphs, the forward again before each backward
done.out = None => done.out = done.edge = None
---
done = step.passes[key] if kind == "I" else step.passes.pop(key)
=>
done = step.passes[key] if kind == "I" else step.passes.pop(key)
done = (SplitPass if kind == "I" else StagePass)(self.stages[str(stage)], done.x, self.output_fn(step, *key))
done.out = None
if kind == "I":
    step.passes[key] = done

# %% 09.9 positions get lost
self.output_fn(step, *key), *step.args[micro_batch] => self.output_fn(step, *key)

# %% 09.9 always the first micro-batch's positions
step.args[micro_batch] => step.args[0]

# %% 09.10 breadth first, whatever run says
m, run => m, m
first + run => first + m
* run => * m

# %% 09.10 depth first, whatever run says
m, run => m, p
first + run => first + p
* run => * p

# %% 09.10 chunks are not reversed in backward
reversed(range(v)) => range(v)

# %% 09.10 ahead: the trip is counted once
2 * (p - 1 - rank) => (p - 1 - rank)

# %% 09.10 ahead: runs of p, whatever run says
* run => * p

# %% 09.10 one forward too many ahead
(p - 1 - rank) => (p - 1 - rank) + 1

# %% 09.10 a rank's stages are neighbours
chunk * p + rank => rank * v + chunk

# %% 09.10 all forwards, then all backwards
(v - 1) * run + 2 * (p - 1 - rank) => m * v

# %% 09.10 backwards breadth first
m, run => m, size := run if kind == "F" else m
first + run => first + size

# %% 09.10 one micro-batch after the other through all chunks
starts = itertools.product(range(0, m, run), chunks)
return [Action(kind, chunk * p + rank, i) for first, chunk in starts for i in range(first, first + run)]
=>
chunks = list(chunks)
return [Action(kind, chunk * p + rank, i) for i in range(m) for chunk in chunks]

# %% 09.11 both products, whatever is asked
weight.to(gradient.dtype) if wants_x else None => weight
(0, -2) if wants_weight else None => (0, -2)

# %% 09.11 makes both, then hands out what is asked
grad_x = gradient @ weight.to(gradient.dtype) if wants_x else None
grad_weight = rows.t() @ x.flatten(0, -2) if wants_weight else None
=>
grad_x, grad_weight = gradient @ weight, rows.t() @ x.flatten(0, -2)
grad_x, grad_weight = grad_x if wants_x else None, grad_weight if wants_weight else None

# %% 09.11 the weight's gradient of the first sequence alone
rows.t() @ x.flatten(0, -2) => gradient[0].t() @ x[0]

# %% 09.11 the bias has the mean
rows.sum => rows.mean

# %% 09.11 the bias unasked
(0) if wants_bias else None => (0)

# %% 09.11 zeros for what is not asked
weight.to(gradient.dtype) if wants_x else None => weight if wants_x else torch.zeros_like(x)

# %% 09.11 asks needs_input_grad for x and means both
if wants_weight => if wants_x

# %% 09.11 fake: F.linear once more, and autograd
class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype), bias if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        with torch.enable_grad():
            given = [
                x.detach().requires_grad_(),
                weight.detach().requires_grad_(),
                torch.zeros(len(weight), dtype=x.dtype, requires_grad=True),
            ]
            found = torch.autograd.grad(F.linear(*given), given, gradient)
        return tuple(one if wanted else None for one, wanted in zip(found, (wants_x, wants_weight, wants_bias)))

# %% 09.11 the weight is not cast
weight.to(gradient.dtype) if => weight if

# %% 09.11 the gradient is cast to the weight's dtype
gradient @ weight.to(gradient.dtype) if => gradient.to(weight.dtype) @ weight if

# %% 09.12 writes .grad, so that no hook fires
@torch.no_grad()
def weight_gradients(self: SplitPass) -> None:
    while self.deferred:
        deferred = self.deferred.pop()
        found = deferred.run()
        for i, (edge, _) in deferred.edges.items():
            if found[i] is not None:
                torch.autograd.backward([edge], [found[i]], retain_graph=True)
    for weight, proxy in zip(self.weights, self.proxies, strict=True):
        if proxy.grad is not None:
            weight.grad = proxy.grad if weight.grad is None else weight.grad + proxy.grad

# %% 09.12 hooks fire twice
@torch.no_grad()
def weight_gradients(self: SplitPass) -> None:
    while self.deferred:
        deferred = self.deferred.pop()
        found = deferred.run()
        for i, (edge, _) in deferred.edges.items():
            if found[i] is not None:
                torch.autograd.backward([edge], [found[i]], retain_graph=True)
    for weight, proxy in zip(self.weights, self.proxies, strict=True):
        if proxy.grad is not None:
            half = proxy.grad / 2
            torch.autograd.backward([weight], [half])
            torch.autograd.backward([weight], [half])

# %% 09.12 a hook for every use of a weight
@torch.no_grad()
def weight_gradients(self: SplitPass) -> None:
    while self.deferred:
        deferred = self.deferred.pop()
        found = deferred.run()
        for i, (edge, _) in deferred.edges.items():
            if found[i] is not None:
                whose = dict(zip(self.proxies, self.weights))
                whole = type(edge.node).__name__ == "AccumulateGrad"
                target = whose[edge.node.variable] if whole else edge
                torch.autograd.backward([target], [found[i]], retain_graph=True)
    for weight, proxy in zip(self.weights, self.proxies, strict=True):
        if proxy.grad is not None:
            torch.autograd.backward([weight], [proxy.grad])

# %% 09.12 the weight's gradient is replaced
@torch.no_grad()
def weight_gradients(self: SplitPass) -> None:
    while self.deferred:
        deferred = self.deferred.pop()
        found = deferred.run()
        for i, (edge, _) in deferred.edges.items():
            if found[i] is not None:
                torch.autograd.backward([edge], [found[i]], retain_graph=True)
    for weight, proxy in zip(self.weights, self.proxies, strict=True):
        if proxy.grad is not None:
            weight.grad = None
            torch.autograd.backward([weight], [proxy.grad])

# %% 09.12 keeps what is deferred
@torch.no_grad()
def weight_gradients(self: SplitPass) -> None:
    for deferred in self.deferred:
        found = deferred.run()
        for i, (edge, _) in deferred.edges.items():
            if found[i] is not None:
                torch.autograd.backward([edge], [found[i]], retain_graph=True)
    for weight, proxy in zip(self.weights, self.proxies, strict=True):
        if proxy.grad is not None:
            torch.autograd.backward([weight], [proxy.grad])

# %% 09.12 of a weight that is used twice only one use counts
@torch.no_grad()
def weight_gradients(self: SplitPass) -> None:
    while self.deferred:
        deferred = self.deferred.pop()
        found = deferred.run()
        for i, (edge, _) in deferred.edges.items():
            if found[i] is not None:
                for _, proxy in [deferred.edges[i]]:
                    proxy.grad = None
                torch.autograd.backward([edge], [found[i]], retain_graph=True)
    for weight, proxy in zip(self.weights, self.proxies, strict=True):
        if proxy.grad is not None:
            torch.autograd.backward([weight], [proxy.grad])

# %% 09.12 norms and biases are forgotten
@torch.no_grad()
def weight_gradients(self: SplitPass) -> None:
    while self.deferred:
        deferred = self.deferred.pop()
        found = deferred.run()
        done = set()
        for i, (edge, behind) in deferred.edges.items():
            done.add(behind)
            if found[i] is not None:
                torch.autograd.backward([edge], [found[i]], retain_graph=True)
    for weight, proxy in zip(self.weights, self.proxies, strict=True):
        if proxy.grad is not None and proxy.dim() > 1:
            torch.autograd.backward([weight], [proxy.grad])

# %% 09.12 straight to the weight, past casts and transposes
@torch.no_grad()
def weight_gradients(self: SplitPass) -> None:
    while self.deferred:
        deferred = self.deferred.pop()
        found = deferred.run()
        for i, (_, behind) in deferred.edges.items():
            if found[i] is not None:
                torch.autograd.backward([behind], [found[i]])
    for weight, proxy in zip(self.weights, self.proxies, strict=True):
        if proxy.grad is not None:
            torch.autograd.backward([weight], [proxy.grad])

# %% 09.12 only the first weight of each Function
@torch.no_grad()
def weight_gradients(self: SplitPass) -> None:
    while self.deferred:
        deferred = self.deferred.pop()
        found = deferred.run()
        for i, (edge, _) in list(deferred.edges.items())[:1]:
            if found[i] is not None:
                torch.autograd.backward([edge], [found[i]], retain_graph=True)
    for weight, proxy in zip(self.weights, self.proxies, strict=True):
        if proxy.grad is not None:
            torch.autograd.backward([weight], [proxy.grad])

# %% 09.12 unused weights get zeros
@torch.no_grad()
def weight_gradients(self: SplitPass) -> None:
    while self.deferred:
        deferred = self.deferred.pop()
        found = deferred.run()
        for i, (edge, _) in deferred.edges.items():
            if found[i] is not None:
                torch.autograd.backward([edge], [found[i]], retain_graph=True)
    for weight, proxy in zip(self.weights, self.proxies, strict=True):
        gradient = torch.zeros_like(weight) if proxy.grad is None else proxy.grad
        torch.autograd.backward([weight], [gradient])

# %% 09.12 fake: W inside I
def input_gradient(self: SplitPass, gradient):
    if self.edge is not None:
        with SelectiveMatmuls():
            torch.autograd.backward([self.edge], [gradient], inputs=self.defer_weight_grads(self.edge.node))
    self.edge, self.x.grad, gradient = None, None, self.x.grad
    with torch.no_grad():
        self.all_of_w()
    return gradient


def all_of_w(self: SplitPass):
    while self.deferred:
        deferred = self.deferred.pop()
        found = deferred.run()
        for i, (edge, _) in deferred.edges.items():
            if found[i] is not None:
                torch.autograd.backward([edge], [found[i]], retain_graph=True)
    for weight, proxy in zip(self.weights, self.proxies, strict=True):
        if proxy.grad is not None:
            torch.autograd.backward([weight], [proxy.grad])


@torch.no_grad()
def weight_gradients(self: SplitPass) -> None:
    pass

# %% 09.12 fake: all products inside I, handed out in W
def input_gradient(self: SplitPass, gradient):
    if self.edge is not None:
        with SelectiveMatmuls():
            torch.autograd.backward([self.edge], [gradient], inputs=self.defer_weight_grads(self.edge.node))
    self.edge, self.x.grad, gradient = None, None, self.x.grad
    with torch.no_grad():
        self.all_products()
    return gradient


def all_products(self: SplitPass):
    while self.deferred:
        deferred = self.deferred.pop()
        found = deferred.run()
        for i, (edge, _) in deferred.edges.items():
            if found[i] is not None:
                torch.autograd.backward([edge], [found[i]], retain_graph=True)


@torch.no_grad()
def weight_gradients(self: SplitPass) -> None:
    for weight, proxy in zip(self.weights, self.proxies, strict=True):
        if proxy.grad is not None:
            torch.autograd.backward([weight], [proxy.grad])

# %% 09.12 fake: the whole backward again
def __init__(self: SplitPass, stage, x, output_fn, *args):
    self.deferred = []
    self.weights = [weight for weight in stage.parameters() if weight.requires_grad]
    super().__init__(stage, x, output_fn, *args)


def run(self: SplitPass, stage, *args):
    return super().run(stage, *args)


def input_gradient(self: SplitPass, gradient):
    self.gradient = gradient
    if not self.x.requires_grad:
        return None
    return torch.autograd.grad([self.edge], [self.x], [gradient], retain_graph=True)[0]


def weight_gradients(self: SplitPass):
    torch.autograd.backward([self.edge], [self.gradient], inputs=self.weights)
    self.edge = None

# %% 09.12 the graph behind an edge is freed by the first use
@torch.no_grad()
def weight_gradients(self: SplitPass) -> None:
    while self.deferred:
        deferred = self.deferred.pop()
        found = deferred.run()
        for i, (edge, _) in deferred.edges.items():
            if found[i] is not None:
                torch.autograd.backward([edge], [found[i]])
    for weight, proxy in zip(self.weights, self.proxies, strict=True):
        if proxy.grad is not None:
            torch.autograd.backward([weight], [proxy.grad])

# %% 09.12 hands None on
@torch.no_grad()
def weight_gradients(self: SplitPass) -> None:
    while self.deferred:
        deferred = self.deferred.pop()
        found = deferred.run()
        for i, (edge, _) in deferred.edges.items():
            torch.autograd.backward([edge], [found[i]], retain_graph=True)
    for weight, proxy in zip(self.weights, self.proxies, strict=True):
        if proxy.grad is not None:
            torch.autograd.backward([weight], [proxy.grad])

# %% 09.13 fake: each W right after its I
late = k * rank => late = 0

# %% 09.13 all W's at the end
late = k * rank => late = m

# %% 09.13 early ranks put off most
late = k * rank => late = k * (p - 1 - rank)

# %% 09.13 puts off r, whatever k
late = k * rank => late = rank

# %% 09.13 p - 1 - r ahead, whatever k
k * (p - 1 - rank) => p - 1 - rank

# %% 09.13 the W's that are left are forgotten
(forwards, backwards, k * (p - 1 - rank)) + left => (forwards, backwards, k * (p - 1 - rank))

# %% 09.13 fewer micro-batches than put off are not thought of
max(0, m - late) => m - late

# %% 09.13 W before the I that others wait for
backwards = [[Action("I", rank, i)] + ([Action("W", rank, i - late)] if i >= late else []) for i in range(m)]
=>
backwards = [
    ([Action("W", rank, i - late)] if i >= late and late else [])
    + [Action("I", rank, i)]
    + ([Action("W", rank, i)] if not late else [])
    for i in range(m)
]

# %% 09.13 one forward too many ahead
(p - 1 - rank) => (p - 1 - rank) + 1

# %% 09.13 H2 is H1
late = k * rank => late = rank
k * (p - 1 - rank) => p - 1 - rank

# %% 09.14 memory is not counted
- w < self.live and f - i => - i

# %% 09.14 memory is free after I
w < self.live => i < self.live

# %% 09.14 forwards run ahead without end
self.live and f - i < self.max_lead[rank] => self.live

# %% 09.14 I without its own F
if i < f: => if i < self.m:

# %% 09.14 a W always
if w < i and (f - w >= self.live or wait > 0 and wait >= self.fill * self.times["W"][rank]):
=>
if w < i:

# %% 09.14 a W only where memory is full
(f - w >= self.live or wait > 0 and wait >= self.fill * self.times["W"][rank]) => f - w >= self.live

# %% 09.14 no W where memory is full
f - w >= self.live or wait => wait

# %% 09.14 fill is ignored
wait > 0 and wait >= self.fill * self.times["W"][rank] => wait > 0

# %% 09.14 the rank need not be free
max(self.free[rank], time) => time

# %% 09.14 no W where nobody knows what comes next
math.inf => self.free[rank]

# %% 09.14 the gap counts from 0
(starts.values(), default=math.inf) - self.free[rank] => (starts.values(), default=math.inf)

# %% 09.14 a gap of nothing is a gap
wait > 0 and wait >= => wait >=

# %% 09.15 owner_ranks by arithmetic
def owner_ranks(schedule: Schedule, stages: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({stage % len(schedule) for stage in stages}))

# %% 09.15 one rank for each stage
def owner_ranks(schedule: Schedule, stages: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({{a.stage: r for r, row in enumerate(schedule) for a in row}[stage] for stage in stages}))

# %% 09.15 a rank with both stages twice
def owner_ranks(schedule: Schedule, stages: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(r for stage in stages for r, row in enumerate(schedule) if any(a.stage == stage for a in row))

# %% 09.15 owner_ranks of all of the stages
any(action.stage in stages for action in actions) => {*stages} <= {action.stage for action in actions}

# %% 09.15 the micro-batch with the largest number
last = {action.stage: i for i, action in enumerate(actions) if action.kind in "BW"}
=>
last = {
    action.stage: i
    for i, action in enumerate(actions)
    if action.kind in "BW" and action.micro_batch == max(a.micro_batch for a in actions)
}

# %% 09.15 complete after I
"BW" => "BI"

# %% 09.15 shared weights are ignored
return {i for a, i in last.items() if not any(j > i and weights[a] & weights[b] for b, j in last.items())}
=>
return {*last.values()}

# %% 09.15 of stages that share the earlier one
j > i => j < i

# %% 09.15 the rank's last action alone
return {i for a, i in last.items() if not any(j > i and weights[a] & weights[b] for b, j in last.items())}
=>
return {max(last.values())}

# %% 09.15 weights of one name are one weight
set(stage.parameters()) => {name for name, _ in stage.named_parameters()}

# %% 09.16 lost and cut the other way round
who = {"A": "scaled", "B": "lost", "C": "cut", "D": "sound"}

# %% 09.16 takes the scaled one for the sound one
who = {"A": "sound", "B": "cut", "C": "lost", "D": "scaled"}

# %% 09.16 all look sound
who = dict.fromkeys("ABCD", "sound")

# %% 09.16 only one is named
who = {"D": "sound"}

# %% 09.16 as the text lists them
who = {"A": "sound", "B": "lost", "C": "cut", "D": "scaled"}

# %% 09.17 the playbook's: numbers, not bytes
number_bytes * peak => peak

# %% 09.17 bytes on the wrong side
def pipeline_ratio(hidden: int, layers: float, bandwidth: float, peak: float, number_bytes: float = 2) -> float:
    return peak / (32 * hidden * layers * bandwidth * number_bytes)

# %% 09.17 two bytes, whatever is given
return number_bytes => return 2

# %% 09.17 one layer, whatever is given
hidden * layers => 4 * hidden

# %% 09.17 h does not cancel
* hidden => * hidden**2

# %% 09.17 16 FLOPs a weight's half
32 * hidden => 16 * hidden

# %% 09.17 the other way round
def pipeline_ratio(hidden: int, layers: float, bandwidth: float, peak: float, number_bytes: float = 2) -> float:
    return 32 * hidden * layers * bandwidth / (number_bytes * peak)

# %% 09.3 the stage is called past run
out = output_fn(self.run(stage, *args)) => out = output_fn(stage(self.x, *args))

# %% 09.3 a name of its own for the edge
self.out, self.edge = out.detach(), => self.out, self.place = out.detach(),
---
if self.edge is not None:  # else everything up to here is frozen
    torch.autograd.backward([self.edge], [gradient])
self.edge = None
=>
if self.place is not None:
    torch.autograd.backward([self.place], [gradient])
self.place = None

# %% 09.3 the gradient of x is kept
grad_x, self.x.grad = self.x.grad, None => grad_x = self.x.grad

# %% 09.3 an output that needs no gradient is not thought of
if self.edge is not None: => if True:

# %% 09.1 no stage at all is not refused
if not 1 <= stages <= layers + 2: => if stages > layers + 2:

# %% 09.2 stages share the dictionaries of all but the forward hooks
stage.__dict__.update((key, value.copy()) for key, value in vars(model).items() if isinstance(value, dict)) => stage._forward_hooks, stage._forward_pre_hooks = model._forward_hooks.copy(), model._forward_pre_hooks.copy()

# %% 09.2 stages lose the model's hooks
stage.__dict__.update((key, value.copy()) for key, value in vars(model).items() if isinstance(value, dict)) => stage.__dict__.update((key, type(value)()) for key, value in vars(model).items() if isinstance(value, dict))

# %% 09.3 the leaf in float32
self.x = x.detach().requires_grad_(x.is_floating_point()) => self.x = x.detach().float().requires_grad_() if x.is_floating_point() else x.detach()

# %% 09.3 the output in float32
self.out, self.edge = out.detach(), => self.out, self.edge = out.detach().float(),

# %% 09.3 the gradient in float32
return grad_x => return None if grad_x is None else grad_x.float()

# %% 09.5 the last stage's I looks at the stage after
return None if stage == self.last or => return None if kind == "B" and stage == self.last or

# %% 09.5 an I does not need its own F
if not self.forward[index]: => if kind == "B" and not self.forward[index]:

# %% 09.5 W needs its own F alone
return None if self.backward[index] else (False, stage, micro_batch) => return None if self.forward[index] else (False, stage, micro_batch)

# %% 09.6 negative numbers are not seen
if negative := [pair for pair in done if min(pair) < 0]:
    raise ValueError(f"stage {negative[0][0]}, micro-batch {negative[0][1]}: both count from 0")
=>

# %% 09.7 an I waits for no rank
elif kind == "W" or stage == stages - 1: => elif kind in "IW" or stage == stages - 1:

# %% 09.7 what an I makes needs no time to travel
ready = ready if rank_of[source] == rank else ready + t_comm => ready = ready if rank_of[source] == rank or kind == "I" else ready + t_comm

# %% 09.7 stage s is taken to be on rank s mod p
ready = ready if rank_of[source] == rank else ready + t_comm => ready = ready if source // m % len(schedule) == rank else ready + t_comm

# %% 09.7 the rank of stage 0 is not noted
rank_of[index] = rank
if stage == 0:
    continue
=>
if stage == 0:
    continue
rank_of[index] = rank

# %% 09.7 a pair begins when its second can
start = ready if ready > start else start => start = ready if ready > free[rank] else free[rank]

# %% 09.7 only the first of a pair waits
start = ready if ready > start else start => start = start if start > free[rank] else max(ready, start)

# %% 09.9 a SplitPass without positions
with step.autocast:
    done = step.passes[key] = make(
        self.stages[str(stage)], x, self.output_fn(step, *key), *step.args[micro_batch]
    )
=>
with step.autocast:
    if key in self.split:
        done = step.passes[key] = SplitPass(self.stages[str(stage)], x, self.output_fn(step, *key))
    else:
        done = step.passes[key] = make(self.stages[str(stage)], x, self.output_fn(step, *key), *step.args[micro_batch])

# %% 09.9 a SplitPass outside of autocast
with step.autocast: => with contextlib.nullcontext() if key in self.split else step.autocast:

# %% 09.9 one kind of pass per rank
make = SplitPass if key in self.split else StagePass => make = SplitPass if self.split else StagePass

# %% 09.9 the first of the stages of the rank
self.stages[str(stage)], x, => next(iter(self.stages.values())), x,

# %% 09.9 passes by micro-batch alone
key, last = (stage, micro_batch), stage == self.last => key, last = (stage, micro_batch), stage == self.last; whole = key
done = step.passes[key] = make( => done = step.passes[micro_batch] = make(
step.passes.pop(key).weight_gradients() => step.passes.pop(micro_batch).weight_gradients()
done = step.passes[key] if kind == "I" else step.passes.pop(key) => done = step.passes[micro_batch] if kind == "I" else step.passes.pop(micro_batch)

# %% 09.9 the last rank is taken to have the last stage
key, last = (stage, micro_batch), stage == self.last => key, last = (stage, micro_batch), self.group.rank() == self.group.size() - 1

# %% 09.9 the first rank has only the first stage
x = step.inputs[micro_batch] if stage == 0 else => x = step.inputs[micro_batch] if self.group.rank() == 0 else

# %% 09.11 a view of the gradient
rows = gradient.flatten(0, -2) => rows = gradient.view(-1, gradient.shape[-1])

# %% 09.11 a view of x
x.flatten(0, -2) if wants_weight => x.view(-1, x.shape[-1]) if wants_weight

# %% 09.11 a matmul in the weight's dtype
grad_x = gradient @ weight.to(gradient.dtype) if wants_x else None => grad_x = (gradient.to(weight.dtype) @ weight).to(gradient.dtype) if wants_x else None

# %% 09.13 warmup of H2 at most
k * (p - 1 - rank)) => min(k, 2) * (p - 1 - rank))

# %% 09.14 rank 0's time of a W
self.times["W"][rank] => self.times["W"][0]

# %% 09.14 rank 0's lead
f - i < self.max_lead[rank] => f - i < self.max_lead[0]

# %% 09.14 a gap of just the length is too short
wait >= self.fill => wait > self.fill

# %% 09.15 B's do not count where there are W's
if action.kind in "BW"} => if action.kind == "W" or action.kind == "B" and not any(a.kind == "W" for a in actions)}

# %% 09.6 a rank without actions
max(itertools.accumulate(row), default=0) => max(itertools.accumulate(row))
