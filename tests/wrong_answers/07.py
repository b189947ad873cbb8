"""Wrong answers that the checks of notebook 07 must catch. None of them hangs."""

# %% 07.1 g: gathers, and cuts in backward
from course_lib.sequence_parallel.model import GatherSequence as RightGather, ReduceScatterSequence


class GatherSequence(RightGather):
    @staticmethod
    def backward(ctx, gradient):
        return by_rank(gradient, ctx.group.size())[ctx.group.rank()].contiguous(), None


# %% 07.1 g: gathers, and averages in backward
from course_lib.sequence_parallel.model import GatherSequence as RightGather, ReduceScatterSequence


class GatherSequence(RightGather):
    @staticmethod
    def backward(ctx, gradient):
        own, work = start_reduce_scatter(by_rank(gradient, ctx.group.size()), ctx.group)
        work.wait()
        return own / ctx.group.size(), None


# %% 07.1 g over all ranks instead of the group
from course_lib.sequence_parallel.model import GatherSequence as RightGather, ReduceScatterSequence


class GatherSequence(RightGather):
    @staticmethod
    def forward(ctx, part, group):
        return RightGather.forward(ctx, part, dist.group.WORLD)


# %% 07.1 g* over all ranks instead of the group
from course_lib.sequence_parallel.model import GatherSequence, ReduceScatterSequence as RightScatter


class ReduceScatterSequence(RightScatter):
    @staticmethod
    def forward(ctx, summand, group):
        return RightScatter.forward(ctx, summand, dist.group.WORLD)


# %% 07.1 g: parts are laid behind one another without in_order
from course_lib.sequence_parallel.model import GatherSequence as RightGather, ReduceScatterSequence


class GatherSequence(RightGather):
    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        pieces, work = start_gather(part, group)
        work.wait()
        return pieces.view(len(part), -1, *part.shape[2:])


# %% 07.1 g*: keeps its own tokens' gradient to itself in backward
from course_lib.sequence_parallel.model import GatherSequence, ReduceScatterSequence as RightScatter


class ReduceScatterSequence(RightScatter):
    @staticmethod
    def backward(ctx, gradient):
        n = ctx.group.size()
        pieces = gradient.new_zeros(n, *gradient.shape)
        pieces[ctx.group.rank()] = gradient
        return in_order(pieces), None


# %% 07.1 g*: all-reduces, then cuts
from course_lib.sequence_parallel.model import GatherSequence, ReduceScatterSequence as RightScatter


class ReduceScatterSequence(RightScatter):
    @staticmethod
    def forward(ctx, summand, group):
        ctx.group = group
        total = summand.clone()
        dist.all_reduce(total, group=group)
        return by_rank(total, group.size())[group.rank()].contiguous()


# %% 07.1 g*: a mean instead of the sum
from course_lib.sequence_parallel.model import GatherSequence, ReduceScatterSequence as RightScatter


class ReduceScatterSequence(RightScatter):
    @staticmethod
    def forward(ctx, summand, group):
        ctx.group = group
        own, work = start_reduce_scatter(by_rank(summand, group.size()), group)
        work.wait()
        return own / group.size()


# %% 07.1 g*: scatters parts of the batch, not of the sequence
from course_lib.sequence_parallel.model import GatherSequence, ReduceScatterSequence as RightScatter


class ReduceScatterSequence(RightScatter):
    @staticmethod
    def forward(ctx, summand, group):
        ctx.group = group
        n = group.size()
        part = (len(summand), summand.shape[1] // n, *summand.shape[2:])
        own, work = start_reduce_scatter(summand.reshape(n, *part), group)
        work.wait()
        return own


# %% 07.2 waits for the gathered x at once
import course_lib.sequence_parallel.model


class GatheredProducts(course_lib.sequence_parallel.model.GatheredProducts):
    @staticmethod
    def backward(ctx, *gradients):
        part, *weights = ctx.saved_tensors
        needed, rows = ctx.needs_input_grad[2:], [gradient.flatten(0, -2) for gradient in gradients]
        own, grad_weights = None, [None] * len(weights)
        if any(needed):
            pieces, gathering = start_gather(part, ctx.group)
            gathering.wait()
        if ctx.needs_input_grad[0]:
            grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
            grad_x = by_rank(grad_x.unflatten(0, gradients[0].shape[:-1]), ctx.group.size())
            own, scattering = start_reduce_scatter(grad_x, ctx.group)
        if any(needed):
            gathering.wait()
            x = in_order(pieces).flatten(0, -2)
            grad_weights = [row.t() @ x if need else None for row, need in zip(rows, needed, strict=True)]
        if ctx.needs_input_grad[0]:
            scattering.wait()
        return own, None, *grad_weights


# %% 07.2 waits for the reduce-scatter at once
import course_lib.sequence_parallel.model


class GatheredProducts(course_lib.sequence_parallel.model.GatheredProducts):
    @staticmethod
    def backward(ctx, *gradients):
        part, *weights = ctx.saved_tensors
        needed, rows = ctx.needs_input_grad[2:], [gradient.flatten(0, -2) for gradient in gradients]
        own, grad_weights = None, [None] * len(weights)
        if any(needed):
            pieces, gathering = start_gather(part, ctx.group)
        if ctx.needs_input_grad[0]:
            grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
            grad_x = by_rank(grad_x.unflatten(0, gradients[0].shape[:-1]), ctx.group.size())
            own, scattering = start_reduce_scatter(grad_x, ctx.group)
            scattering.wait()
        if any(needed):
            gathering.wait()
            x = in_order(pieces).flatten(0, -2)
            grad_weights = [row.t() @ x if need else None for row, need in zip(rows, needed, strict=True)]
        if ctx.needs_input_grad[0]:
            scattering.wait()
        return own, None, *grad_weights


# %% 07.2 gathers x after the product for x's gradient
import course_lib.sequence_parallel.model


class GatheredProducts(course_lib.sequence_parallel.model.GatheredProducts):
    @staticmethod
    def backward(ctx, *gradients):
        part, *weights = ctx.saved_tensors
        needed, rows = ctx.needs_input_grad[2:], [gradient.flatten(0, -2) for gradient in gradients]
        own, grad_weights = None, [None] * len(weights)
        if ctx.needs_input_grad[0]:
            grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
            grad_x = by_rank(grad_x.unflatten(0, gradients[0].shape[:-1]), ctx.group.size())
            own, scattering = start_reduce_scatter(grad_x, ctx.group)
        if any(needed):
            pieces, gathering = start_gather(part, ctx.group)
            gathering.wait()
            x = in_order(pieces).flatten(0, -2)
            grad_weights = [row.t() @ x if need else None for row, need in zip(rows, needed, strict=True)]
        if ctx.needs_input_grad[0]:
            scattering.wait()
        return own, None, *grad_weights


# %% 07.2 gathers x where no weight wants a gradient
import course_lib.sequence_parallel.model


class GatheredProducts(course_lib.sequence_parallel.model.GatheredProducts):
    @staticmethod
    def backward(ctx, *gradients):
        part, *weights = ctx.saved_tensors
        needed, rows = ctx.needs_input_grad[2:], [gradient.flatten(0, -2) for gradient in gradients]
        own, grad_weights = None, [None] * len(weights)
        if True:
            pieces, gathering = start_gather(part, ctx.group)
        if ctx.needs_input_grad[0]:
            grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
            grad_x = by_rank(grad_x.unflatten(0, gradients[0].shape[:-1]), ctx.group.size())
            own, scattering = start_reduce_scatter(grad_x, ctx.group)
        if True:
            gathering.wait()
            x = in_order(pieces).flatten(0, -2)
            grad_weights = [row.t() @ x if need else None for row, need in zip(rows, needed, strict=True)]
        if ctx.needs_input_grad[0]:
            scattering.wait()
        return own, None, *grad_weights


# %% 07.2 gathers twice
import course_lib.sequence_parallel.model


class GatheredProducts(course_lib.sequence_parallel.model.GatheredProducts):
    @staticmethod
    def backward(ctx, *gradients):
        part, *weights = ctx.saved_tensors
        needed, rows = ctx.needs_input_grad[2:], [gradient.flatten(0, -2) for gradient in gradients]
        own, grad_weights = None, [None] * len(weights)
        if any(needed):
            pieces, gathering = start_gather(part, ctx.group)
        if ctx.needs_input_grad[0]:
            grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
            grad_x = by_rank(grad_x.unflatten(0, gradients[0].shape[:-1]), ctx.group.size())
            own, scattering = start_reduce_scatter(grad_x, ctx.group)
        if any(needed):
            gathering.wait()
            pieces, gathering = start_gather(part, ctx.group)
            gathering.wait()
            x = in_order(pieces).flatten(0, -2)
            grad_weights = [row.t() @ x if need else None for row, need in zip(rows, needed, strict=True)]
        if ctx.needs_input_grad[0]:
            scattering.wait()
        return own, None, *grad_weights


# %% 07.2 a reduce-scatter for each weight
import course_lib.sequence_parallel.model


class GatheredProducts(course_lib.sequence_parallel.model.GatheredProducts):
    @staticmethod
    def backward(ctx, *gradients):
        part, *weights = ctx.saved_tensors
        needed, rows = ctx.needs_input_grad[2:], [gradient.flatten(0, -2) for gradient in gradients]
        own, grad_weights = None, [None] * len(weights)
        if any(needed):
            pieces, gathering = start_gather(part, ctx.group)
        if ctx.needs_input_grad[0]:
            own, sent = 0, []
            for row, weight in zip(rows, weights, strict=True):
                grad_x = by_rank((row @ weight).unflatten(0, gradients[0].shape[:-1]), ctx.group.size())
                sent.append(start_reduce_scatter(grad_x, ctx.group))
        if any(needed):
            gathering.wait()
            x = in_order(pieces).flatten(0, -2)
            grad_weights = [row.t() @ x if need else None for row, need in zip(rows, needed, strict=True)]
        if ctx.needs_input_grad[0]:
            for part, work in sent:
                work.wait()
                own = own + part
        return own, None, *grad_weights


# %% 07.2 cuts x's gradient instead of summing it
import course_lib.sequence_parallel.model


class GatheredProducts(course_lib.sequence_parallel.model.GatheredProducts):
    @staticmethod
    def backward(ctx, *gradients):
        part, *weights = ctx.saved_tensors
        needed, rows = ctx.needs_input_grad[2:], [gradient.flatten(0, -2) for gradient in gradients]
        own, grad_weights = None, [None] * len(weights)
        if any(needed):
            pieces, gathering = start_gather(part, ctx.group)
        if ctx.needs_input_grad[0]:
            grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
            grad_x = by_rank(grad_x.unflatten(0, gradients[0].shape[:-1]), ctx.group.size())
            own = grad_x[ctx.group.rank()].contiguous()
        if any(needed):
            gathering.wait()
            x = in_order(pieces).flatten(0, -2)
            grad_weights = [row.t() @ x if need else None for row, need in zip(rows, needed, strict=True)]
        return own, None, *grad_weights


# %% 07.2 a weight's gradient from the own tokens alone
import course_lib.sequence_parallel.model


class GatheredProducts(course_lib.sequence_parallel.model.GatheredProducts):
    @staticmethod
    def backward(ctx, *gradients):
        part, *weights = ctx.saved_tensors
        needed, rows = ctx.needs_input_grad[2:], [gradient.flatten(0, -2) for gradient in gradients]
        own, grad_weights = None, [None] * len(weights)
        if any(needed):
            pieces, gathering = start_gather(part, ctx.group)
        if ctx.needs_input_grad[0]:
            grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
            grad_x = by_rank(grad_x.unflatten(0, gradients[0].shape[:-1]), ctx.group.size())
            own, scattering = start_reduce_scatter(grad_x, ctx.group)
        if any(needed):
            gathering.wait()
            x = part.flatten(0, -2)
            rows = [by_rank(g, ctx.group.size())[ctx.group.rank()].flatten(0, -2) for g in gradients]
            grad_weights = [row.t() @ x if need else None for row, need in zip(rows, needed, strict=True)]
        if ctx.needs_input_grad[0]:
            scattering.wait()
        return own, None, *grad_weights


# %% 07.2 multiplies for weights that want nothing
import course_lib.sequence_parallel.model


class GatheredProducts(course_lib.sequence_parallel.model.GatheredProducts):
    @staticmethod
    def backward(ctx, *gradients):
        part, *weights = ctx.saved_tensors
        needed, rows = ctx.needs_input_grad[2:], [gradient.flatten(0, -2) for gradient in gradients]
        own, grad_weights = None, [None] * len(weights)
        if any(needed):
            pieces, gathering = start_gather(part, ctx.group)
        if ctx.needs_input_grad[0]:
            grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
            grad_x = by_rank(grad_x.unflatten(0, gradients[0].shape[:-1]), ctx.group.size())
            own, scattering = start_reduce_scatter(grad_x, ctx.group)
        if any(needed):
            gathering.wait()
            x = in_order(pieces).flatten(0, -2)
            grad_weights = [row.t() @ x for row in rows]
        if ctx.needs_input_grad[0]:
            scattering.wait()
        return own, None, *grad_weights


# %% 07.2 fake: keeps the gathered x
import course_lib.sequence_parallel.model


class GatheredProducts(course_lib.sequence_parallel.model.GatheredProducts):
    @staticmethod
    def forward(ctx, part, group, *weights):
        ctx.group = group
        pieces, work = start_gather(part, group)
        work.wait()
        x = in_order(pieces)
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *gradients):
        x, *weights = ctx.saved_tensors
        needed, rows = ctx.needs_input_grad[2:], [gradient.flatten(0, -2) for gradient in gradients]
        own = None
        if ctx.needs_input_grad[0]:
            grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
            grad_x = by_rank(grad_x.unflatten(0, gradients[0].shape[:-1]), ctx.group.size())
            own, scattering = start_reduce_scatter(grad_x, ctx.group)
        grad_weights = [row.t() @ x.flatten(0, -2) if need else None for row, need in zip(rows, needed, strict=True)]
        if ctx.needs_input_grad[0]:
            scattering.wait()
        return own, None, *grad_weights


# %% 07.2 does not wait for the reduce-scatter
import course_lib.sequence_parallel.model


class GatheredProducts(course_lib.sequence_parallel.model.GatheredProducts):
    @staticmethod
    def backward(ctx, *gradients):
        part, *weights = ctx.saved_tensors
        needed, rows = ctx.needs_input_grad[2:], [gradient.flatten(0, -2) for gradient in gradients]
        own, grad_weights = None, [None] * len(weights)
        if any(needed):
            pieces, gathering = start_gather(part, ctx.group)
        if ctx.needs_input_grad[0]:
            grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
            grad_x = by_rank(grad_x.unflatten(0, gradients[0].shape[:-1]), ctx.group.size())
            own, scattering = start_reduce_scatter(grad_x, ctx.group)
        if any(needed):
            gathering.wait()
            x = in_order(pieces).flatten(0, -2)
            grad_weights = [row.t() @ x if need else None for row, need in zip(rows, needed, strict=True)]
        return own, None, *grad_weights


# %% 07.3 always right
def diagnose(differing, ratios):
    return "norms left out" if differing else "right"


# %% 07.3 fake: knows the order of the four runs
asked = []


def diagnose(differing, ratios):
    asked.append(differing)
    return ("norms averaged", "g", "right", "norms left out")[(len(asked) - 1) % 4]


# %% 07.3 looks for a quarter, whatever the ranks
def diagnose(differing, ratios):
    if differing:
        return "norms left out"
    if all(abs(ratio - 1) < 1e-3 for ratio in ratios.values()):
        return "right"
    return "norms averaged" if abs(ratios["norm.weight"] - 1 / 4) < 1e-3 else "g"


# %% 07.3 leaves no room for rounding
def diagnose(differing, ratios):
    if differing:
        return "norms left out"
    wrong = [name for name, ratio in ratios.items() if ratio != 1]
    if not wrong:
        return "right"
    return "norms averaged" if all(name.endswith("norm.weight") for name in wrong) else "g"


# %% 07.3 any norm that is off is taken for averaging
def diagnose(differing, ratios):
    if differing:
        return "norms left out"
    wrong = [name for name, ratio in ratios.items() if abs(ratio - 1) > 1e-3]
    if not wrong:
        return "right"
    return "norms averaged" if any(name.endswith("norm.weight") for name in wrong) else "g"


# %% 07.3 averaging and leaving out mixed up
def diagnose(differing, ratios):
    if differing:
        return "norms averaged"
    wrong = [name for name, ratio in ratios.items() if abs(ratio - 1) > 1e-3]
    if not wrong:
        return "right"
    return "norms left out" if all(name.endswith("norm.weight") for name in wrong) else "g"


# %% 07.3 looks at the ratios alone
def diagnose(differing, ratios):
    wrong = [name for name, ratio in ratios.items() if abs(ratio - 1) > 1e-3]
    if not wrong:
        return "right"
    return "norms averaged" if all(name.endswith("norm.weight") for name in wrong) else "g"


# %% 07.4 the norms' gradients are left out
class SequenceParallelNorm(SplitNorm):
    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def apply_sequence_parallel(model, group=None, reduce_group=None):
    group = group or dist.group.WORLD
    check_sequence_parallel(model, group)
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear):
            module.products = GatheredProducts
        elif isinstance(module, (RowParallelLinear, VocabParallelEmbedding)):
            module.leave = reduce_scatter_sequence
    for parent in (*model.blocks, model):
        for name, norm in list(parent.named_children()):
            if not isinstance(norm, nn.RMSNorm):
                continue
            if reduce_group is None:
                setattr(parent, name, SequenceParallelNorm(norm, group))
            else:
                norm.weight.reduce_group = reduce_group
    model.register_forward_pre_hook(need_positions, with_kwargs=True)
    return model


# %% 07.4 the norms' gradients are averaged
class SequenceParallelNorm(SplitNorm):
    def forward(self, x):
        n = self.group.size()
        own = self.weight / n + (self.weight - self.weight / n).detach()
        return F.rms_norm(x, self.weight.shape, copy_to_group(own, self.group), self.eps)


def apply_sequence_parallel(model, group=None, reduce_group=None):
    group = group or dist.group.WORLD
    check_sequence_parallel(model, group)
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear):
            module.products = GatheredProducts
        elif isinstance(module, (RowParallelLinear, VocabParallelEmbedding)):
            module.leave = reduce_scatter_sequence
    for parent in (*model.blocks, model):
        for name, norm in list(parent.named_children()):
            if not isinstance(norm, nn.RMSNorm):
                continue
            if reduce_group is None:
                setattr(parent, name, SequenceParallelNorm(norm, group))
            else:
                norm.weight.reduce_group = reduce_group
    model.register_forward_pre_hook(need_positions, with_kwargs=True)
    return model


# %% 07.4 the last norm is forgotten
class SequenceParallelNorm(SplitNorm):
    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, copy_to_group(self.weight, self.group), self.eps)


def apply_sequence_parallel(model, group=None, reduce_group=None):
    group = group or dist.group.WORLD
    check_sequence_parallel(model, group)
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear):
            module.products = GatheredProducts
        elif isinstance(module, (RowParallelLinear, VocabParallelEmbedding)):
            module.leave = reduce_scatter_sequence
    for parent in model.blocks:
        for name, norm in list(parent.named_children()):
            if not isinstance(norm, nn.RMSNorm):
                continue
            if reduce_group is None:
                setattr(parent, name, SequenceParallelNorm(norm, group))
            else:
                norm.weight.reduce_group = reduce_group
    model.register_forward_pre_hook(need_positions, with_kwargs=True)
    return model


# %% 07.4 norms through f and reduce_group
class SequenceParallelNorm(SplitNorm):
    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, copy_to_group(self.weight, self.group), self.eps)


def apply_sequence_parallel(model, group=None, reduce_group=None):
    group = group or dist.group.WORLD
    check_sequence_parallel(model, group)
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear):
            module.products = GatheredProducts
        elif isinstance(module, (RowParallelLinear, VocabParallelEmbedding)):
            module.leave = reduce_scatter_sequence
    for parent in (*model.blocks, model):
        for name, norm in list(parent.named_children()):
            if not isinstance(norm, nn.RMSNorm):
                continue
            setattr(parent, name, SequenceParallelNorm(norm, group))
            if reduce_group is not None:
                norm.weight.reduce_group = reduce_group
    model.register_forward_pre_hook(need_positions, with_kwargs=True)
    return model


# %% 07.4 reduce_group is ignored
class SequenceParallelNorm(SplitNorm):
    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, copy_to_group(self.weight, self.group), self.eps)


def apply_sequence_parallel(model, group=None, reduce_group=None):
    group = group or dist.group.WORLD
    check_sequence_parallel(model, group)
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear):
            module.products = GatheredProducts
        elif isinstance(module, (RowParallelLinear, VocabParallelEmbedding)):
            module.leave = reduce_scatter_sequence
    for parent in (*model.blocks, model):
        for name, norm in list(parent.named_children()):
            if not isinstance(norm, nn.RMSNorm):
                continue
            setattr(parent, name, SequenceParallelNorm(norm, group))
    model.register_forward_pre_hook(need_positions, with_kwargs=True)
    return model


# %% 07.4 reduce_group: the tensor-parallel ranks alone
class SequenceParallelNorm(SplitNorm):
    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, copy_to_group(self.weight, self.group), self.eps)


def apply_sequence_parallel(model, group=None, reduce_group=None):
    group = group or dist.group.WORLD
    check_sequence_parallel(model, group)
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear):
            module.products = GatheredProducts
        elif isinstance(module, (RowParallelLinear, VocabParallelEmbedding)):
            module.leave = reduce_scatter_sequence
    for parent in (*model.blocks, model):
        for name, norm in list(parent.named_children()):
            if not isinstance(norm, nn.RMSNorm):
                continue
            if reduce_group is None:
                setattr(parent, name, SequenceParallelNorm(norm, group))
            else:
                norm.weight.reduce_group = group
    model.register_forward_pre_hook(need_positions, with_kwargs=True)
    return model


# %% 07.4 the norm's eps is forgotten
class SequenceParallelNorm(SplitNorm):
    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, copy_to_group(self.weight, self.group))


def apply_sequence_parallel(model, group=None, reduce_group=None):
    group = group or dist.group.WORLD
    check_sequence_parallel(model, group)
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear):
            module.products = GatheredProducts
        elif isinstance(module, (RowParallelLinear, VocabParallelEmbedding)):
            module.leave = reduce_scatter_sequence
    for parent in (*model.blocks, model):
        for name, norm in list(parent.named_children()):
            if not isinstance(norm, nn.RMSNorm):
                continue
            if reduce_group is None:
                setattr(parent, name, SequenceParallelNorm(norm, group))
            else:
                norm.weight.reduce_group = reduce_group
    model.register_forward_pre_hook(need_positions, with_kwargs=True)
    return model


# %% 07.4 fake: norms of gathered tokens, on every rank
class SequenceParallelNorm(SplitNorm):
    def forward(self, x):
        shard = TensorShard.of(x.shape[1] * self.group.size(), self.group, 1)
        weight = copy_to_group(self.weight, self.group)
        return shard.cut(F.rms_norm(gather_from_group(x, shard), self.weight.shape, weight, self.eps))


def apply_sequence_parallel(model, group=None, reduce_group=None):
    group = group or dist.group.WORLD
    check_sequence_parallel(model, group)
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear):
            module.products = GatheredProducts
        elif isinstance(module, (RowParallelLinear, VocabParallelEmbedding)):
            module.leave = reduce_scatter_sequence
    for parent in (*model.blocks, model):
        for name, norm in list(parent.named_children()):
            if not isinstance(norm, nn.RMSNorm):
                continue
            if reduce_group is None:
                setattr(parent, name, SequenceParallelNorm(norm, group))
            else:
                norm.weight.reduce_group = reduce_group
    model.register_forward_pre_hook(need_positions, with_kwargs=True)
    return model


# %% 07.4 hooks on weights, which a model from the meta device loses
class SequenceParallelNorm(SplitNorm):
    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, copy_to_group(self.weight, self.group), self.eps)


def sum_of(gradient, group):
    total = gradient.clone()
    dist.all_reduce(total, group=group)
    return total


def apply_sequence_parallel(model, group=None, reduce_group=None):
    group = group or dist.group.WORLD
    check_sequence_parallel(model, group)
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear):
            module.products = GatheredProducts
        elif isinstance(module, (RowParallelLinear, VocabParallelEmbedding)):
            module.leave = reduce_scatter_sequence
    for parent in (*model.blocks, model):
        for name, norm in list(parent.named_children()):
            if not isinstance(norm, nn.RMSNorm):
                continue
            if reduce_group is None:
                norm.weight.register_hook(lambda gradient: sum_of(gradient, group))
            else:
                norm.weight.reduce_group = reduce_group
    model.register_forward_pre_hook(need_positions, with_kwargs=True)
    return model


# %% 07.4 a norm sums over all ranks instead of the group
class SequenceParallelNorm(SplitNorm):
    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, copy_to_group(self.weight, dist.group.WORLD), self.eps)


def apply_sequence_parallel(model, group=None, reduce_group=None):
    group = group or dist.group.WORLD
    check_sequence_parallel(model, group)
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear):
            module.products = GatheredProducts
        elif isinstance(module, (RowParallelLinear, VocabParallelEmbedding)):
            module.leave = reduce_scatter_sequence
    for parent in (*model.blocks, model):
        for name, norm in list(parent.named_children()):
            if not isinstance(norm, nn.RMSNorm):
                continue
            if reduce_group is None:
                setattr(parent, name, SequenceParallelNorm(norm, group))
            else:
                norm.weight.reduce_group = reduce_group
    model.register_forward_pre_hook(need_positions, with_kwargs=True)
    return model


# %% 07.5 every place has a part of the tokens
shapes = {"after the embedding": ((2, 16, 48), (2, 4, 48))}
PLACES = ["after the embedding", "after a norm", "into the product of q", "q", "into o", "after o", "gate", "logits"]
shapes |= {
    "after a norm": ((2, 16, 48), (2, 4, 48)),
    "into the product of q": ((2, 16, 48), (2, 4, 48)),
    "q": ((2, 16, 12), (2, 4, 12)),
    "into o": ((2, 16, 12), (2, 4, 12)),
    "after o": ((2, 16, 48), (2, 4, 48)),
    "gate": ((2, 16, 25), (2, 4, 25)),
    "logits": ((2, 16, 25), (2, 4, 25)),
}


# %% 07.5 what comes out of o is whole
shapes = {"after the embedding": ((2, 16, 48), (2, 4, 48))}
PLACES = ["after the embedding", "after a norm", "into the product of q", "q", "into o", "after o", "gate", "logits"]
shapes |= {
    "after a norm": ((2, 16, 48), (2, 4, 48)),
    "into the product of q": ((2, 16, 48), (2, 16, 48)),
    "q": ((2, 16, 12), (2, 16, 12)),
    "into o": ((2, 16, 12), (2, 16, 12)),
    "after o": ((2, 16, 48), (2, 16, 48)),
    "gate": ((2, 16, 25), (2, 16, 25)),
    "logits": ((2, 16, 25), (2, 16, 25)),
}


# %% 07.5 logits and the feed-forward layer are whole with tensor parallelism
shapes = {"after the embedding": ((2, 16, 48), (2, 4, 48))}
PLACES = ["after the embedding", "after a norm", "into the product of q", "q", "into o", "after o", "gate", "logits"]
shapes |= {
    "after a norm": ((2, 16, 48), (2, 4, 48)),
    "into the product of q": ((2, 16, 48), (2, 16, 48)),
    "q": ((2, 16, 12), (2, 16, 12)),
    "into o": ((2, 16, 12), (2, 16, 12)),
    "after o": ((2, 16, 48), (2, 4, 48)),
    "gate": ((2, 16, 100), (2, 16, 25)),
    "logits": ((2, 16, 97), (2, 16, 25)),
}


# %% 07.5 the places of one column are missing
shapes = {"after the embedding": ((2, 16, 48), (2, 4, 48))}
PLACES = ["after the embedding", "after a norm", "into the product of q", "q", "into o", "after o", "gate", "logits"]
shapes |= {place: ((2, 16, 48),) for place in PLACES[1:]}


# %% 07.6 weighs by the new lse
import torch


def merge(out, lse, part, part_lse):
    torch.logaddexp(lse, part_lse, out=lse)
    out.lerp_(part.to(out.dtype), torch.sigmoid(part_lse - lse)[..., None])


# %% 07.6 a mean without weights
import torch


def merge(out, lse, part, part_lse):
    weight = torch.where(lse.isinf(), 1.0, 0.5)
    out.lerp_(part.to(out.dtype), weight[..., None])
    torch.logaddexp(lse, part_lse, out=lse)


# %% 07.6 sums of exponentials, which overflow
import torch


def merge(out, lse, part, part_lse):
    old, new = lse.exp(), part_lse.exp()
    out.copy_((out * old[..., None] + part * new[..., None]) / (old + new)[..., None])
    lse.copy_((old + new).log())


# %% 07.6 sums in the piece's dtype
import torch


def merge(out, lse, part, part_lse):
    total = out.to(part.dtype).lerp(part, torch.sigmoid(part_lse - lse)[..., None].to(part.dtype))
    out.copy_(total)
    torch.logaddexp(lse, part_lse, out=lse)


# %% 07.6 weights in the piece's dtype
import torch


def merge(out, lse, part, part_lse):
    weight = torch.sigmoid(part_lse - lse)[..., None].to(part.dtype)
    out.copy_(out * (1 - weight) + part * weight)
    torch.logaddexp(lse, part_lse, out=lse)


# %% 07.6 returns what it should change
import torch


def merge(out, lse, part, part_lse):
    weight = torch.sigmoid(part_lse - lse)[..., None]
    return out + weight * (part - out), torch.logaddexp(lse, part_lse)


# %% 07.6 the larger lse instead of the sum's
import torch


def merge(out, lse, part, part_lse):
    out.lerp_(part.to(out.dtype), torch.sigmoid(part_lse - lse)[..., None])
    torch.maximum(lse, part_lse, out=lse)


# %% 07.6 spoils the piece
import torch


def merge(out, lse, part, part_lse):
    new = torch.logaddexp(lse, part_lse)
    out.mul_((lse - new).exp()[..., None]).add_(part.mul_((part_lse - new).exp()[..., None].to(part.dtype)))
    lse.copy_(new)


# %% 07.7 backward with the block's own lse
def plain_forward(q, k, v, causal):
    z = scores(q, k, causal)
    lse = z.logsumexp(-1)
    p = (z - lse[..., None]).exp().to(v.dtype)
    out = torch.einsum("bkgqs,bskd->bqkgd", p, v).flatten(2, 3)
    return out, lse.permute(0, 3, 1, 2).flatten(2)


def plain_backward(gradient, q, k, v, out, lse, causal):
    def of_rows(x):
        return by_group(x, k).permute(0, 2, 3, 1)

    p = scores(q, k, causal).softmax(-1)
    grad = by_group(gradient, k)
    grad_v = torch.einsum("bkgqs,bqkgd->bskd", p.to(grad.dtype), grad)
    grad_p = torch.einsum("bqkgd,bskd->bkgqs", grad, v)
    grad_z = p * (grad_p - of_rows((gradient * out).sum(-1))[..., None]) / math.sqrt(q.shape[-1])
    grad_z = grad_z.to(q.dtype)
    grad_q = torch.einsum("bkgqs,bskd->bqkgd", grad_z, k).flatten(2, 3)
    grad_k = torch.einsum("bkgqs,bqkgd->bskd", grad_z, by_group(q, k))
    return grad_q, grad_k, grad_v


# %% 07.7 backward with the block's own out in D
def plain_forward(q, k, v, causal):
    z = scores(q, k, causal)
    lse = z.logsumexp(-1)
    p = (z - lse[..., None]).exp().to(v.dtype)
    out = torch.einsum("bkgqs,bskd->bqkgd", p, v).flatten(2, 3)
    return out, lse.permute(0, 3, 1, 2).flatten(2)


def plain_backward(gradient, q, k, v, out, lse, causal):
    def of_rows(x):
        return by_group(x, k).permute(0, 2, 3, 1)

    out = plain_forward(q, k, v, causal)[0]
    p = (scores(q, k, causal) - of_rows(lse)[..., None]).exp()
    grad = by_group(gradient, k)
    grad_v = torch.einsum("bkgqs,bqkgd->bskd", p.to(grad.dtype), grad)
    grad_p = torch.einsum("bqkgd,bskd->bkgqs", grad, v)
    grad_z = p * (grad_p - of_rows((gradient * out).sum(-1))[..., None]) / math.sqrt(q.shape[-1])
    grad_z = grad_z.to(q.dtype)
    grad_q = torch.einsum("bkgqs,bskd->bqkgd", grad_z, k).flatten(2, 3)
    grad_k = torch.einsum("bkgqs,bqkgd->bskd", grad_z, by_group(q, k))
    return grad_q, grad_k, grad_v


# %% 07.7 backward without D
def plain_forward(q, k, v, causal):
    z = scores(q, k, causal)
    lse = z.logsumexp(-1)
    p = (z - lse[..., None]).exp().to(v.dtype)
    out = torch.einsum("bkgqs,bskd->bqkgd", p, v).flatten(2, 3)
    return out, lse.permute(0, 3, 1, 2).flatten(2)


def plain_backward(gradient, q, k, v, out, lse, causal):
    def of_rows(x):
        return by_group(x, k).permute(0, 2, 3, 1)

    p = (scores(q, k, causal) - of_rows(lse)[..., None]).exp()
    grad = by_group(gradient, k)
    grad_v = torch.einsum("bkgqs,bqkgd->bskd", p.to(grad.dtype), grad)
    grad_p = torch.einsum("bqkgd,bskd->bkgqs", grad, v)
    grad_z = p * (grad_p) / math.sqrt(q.shape[-1])
    grad_z = grad_z.to(q.dtype)
    grad_q = torch.einsum("bkgqs,bskd->bqkgd", grad_z, k).flatten(2, 3)
    grad_k = torch.einsum("bkgqs,bqkgd->bskd", grad_z, by_group(q, k))
    return grad_q, grad_k, grad_v


# %% 07.7 backward: D from the block's probabilities
def plain_forward(q, k, v, causal):
    z = scores(q, k, causal)
    lse = z.logsumexp(-1)
    p = (z - lse[..., None]).exp().to(v.dtype)
    out = torch.einsum("bkgqs,bskd->bqkgd", p, v).flatten(2, 3)
    return out, lse.permute(0, 3, 1, 2).flatten(2)


def plain_backward(gradient, q, k, v, out, lse, causal):
    def of_rows(x):
        return by_group(x, k).permute(0, 2, 3, 1)

    p = (scores(q, k, causal) - of_rows(lse)[..., None]).exp()
    grad = by_group(gradient, k)
    grad_v = torch.einsum("bkgqs,bqkgd->bskd", p.to(grad.dtype), grad)
    grad_p = torch.einsum("bqkgd,bskd->bkgqs", grad, v)
    grad_z = p * (grad_p - (p * grad_p).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    grad_z = grad_z.to(q.dtype)
    grad_q = torch.einsum("bkgqs,bskd->bqkgd", grad_z, k).flatten(2, 3)
    grad_k = torch.einsum("bkgqs,bqkgd->bskd", grad_z, by_group(q, k))
    return grad_q, grad_k, grad_v


# %% 07.7 backward without 1/sqrt(d)
def plain_forward(q, k, v, causal):
    z = scores(q, k, causal)
    lse = z.logsumexp(-1)
    p = (z - lse[..., None]).exp().to(v.dtype)
    out = torch.einsum("bkgqs,bskd->bqkgd", p, v).flatten(2, 3)
    return out, lse.permute(0, 3, 1, 2).flatten(2)


def plain_backward(gradient, q, k, v, out, lse, causal):
    def of_rows(x):
        return by_group(x, k).permute(0, 2, 3, 1)

    p = (scores(q, k, causal) - of_rows(lse)[..., None]).exp()
    grad = by_group(gradient, k)
    grad_v = torch.einsum("bkgqs,bqkgd->bskd", p.to(grad.dtype), grad)
    grad_p = torch.einsum("bqkgd,bskd->bkgqs", grad, v)
    grad_z = p * (grad_p - of_rows((gradient * out).sum(-1))[..., None])
    grad_z = grad_z.to(q.dtype)
    grad_q = torch.einsum("bkgqs,bskd->bqkgd", grad_z, k).flatten(2, 3)
    grad_k = torch.einsum("bkgqs,bqkgd->bskd", grad_z, by_group(q, k))
    return grad_q, grad_k, grad_v


# %% 07.7 backward: dP takes the heads in another order
def plain_forward(q, k, v, causal):
    z = scores(q, k, causal)
    lse = z.logsumexp(-1)
    p = (z - lse[..., None]).exp().to(v.dtype)
    out = torch.einsum("bkgqs,bskd->bqkgd", p, v).flatten(2, 3)
    return out, lse.permute(0, 3, 1, 2).flatten(2)


def plain_backward(gradient, q, k, v, out, lse, causal):
    def of_rows(x):
        return by_group(x, k).permute(0, 2, 3, 1)

    p = (scores(q, k, causal) - of_rows(lse)[..., None]).exp()
    grad = by_group(gradient, k)
    grad_v = torch.einsum("bkgqs,bqkgd->bskd", p.to(grad.dtype), grad)
    mixed = gradient.unflatten(2, (-1, k.shape[2])).transpose(2, 3)
    grad_p = torch.einsum("bqkgd,bskd->bkgqs", mixed, v)
    grad_z = p * (grad_p - of_rows((gradient * out).sum(-1))[..., None]) / math.sqrt(q.shape[-1])
    grad_z = grad_z.to(q.dtype)
    grad_q = torch.einsum("bkgqs,bskd->bqkgd", grad_z, k).flatten(2, 3)
    grad_k = torch.einsum("bkgqs,bqkgd->bskd", grad_z, by_group(q, k))
    return grad_q, grad_k, grad_v


# %% 07.7 backward: a K/V head gets the gradient of one of its heads
def plain_forward(q, k, v, causal):
    z = scores(q, k, causal)
    lse = z.logsumexp(-1)
    p = (z - lse[..., None]).exp().to(v.dtype)
    out = torch.einsum("bkgqs,bskd->bqkgd", p, v).flatten(2, 3)
    return out, lse.permute(0, 3, 1, 2).flatten(2)


def plain_backward(gradient, q, k, v, out, lse, causal):
    def of_rows(x):
        return by_group(x, k).permute(0, 2, 3, 1)

    p = (scores(q, k, causal) - of_rows(lse)[..., None]).exp()
    grad = by_group(gradient, k)
    grad_v = torch.einsum("bkgqs,bqkgd->bskd", p.to(grad.dtype), grad)
    grad_p = torch.einsum("bqkgd,bskd->bkgqs", grad, v)
    grad_z = p * (grad_p - of_rows((gradient * out).sum(-1))[..., None]) / math.sqrt(q.shape[-1])
    grad_z = grad_z.to(q.dtype)
    grad_q = torch.einsum("bkgqs,bskd->bqkgd", grad_z, k).flatten(2, 3)
    grad_k = torch.einsum("bkqs,bqkd->bskd", grad_z[:, :, 0], by_group(q, k)[:, :, :, 0])
    return grad_q, grad_k, grad_v


# %% 07.7 forward: lse [b, a, s]
def plain_forward(q, k, v, causal):
    z = scores(q, k, causal)
    lse = z.logsumexp(-1)
    p = (z - lse[..., None]).exp().to(v.dtype)
    out = torch.einsum("bkgqs,bskd->bqkgd", p, v).flatten(2, 3)
    return out, lse.flatten(1, 2)


def plain_backward(gradient, q, k, v, out, lse, causal):
    def of_rows(x):
        return by_group(x, k).permute(0, 2, 3, 1)

    p = (scores(q, k, causal) - of_rows(lse)[..., None]).exp()
    grad = by_group(gradient, k)
    grad_v = torch.einsum("bkgqs,bqkgd->bskd", p.to(grad.dtype), grad)
    grad_p = torch.einsum("bqkgd,bskd->bkgqs", grad, v)
    grad_z = p * (grad_p - of_rows((gradient * out).sum(-1))[..., None]) / math.sqrt(q.shape[-1])
    grad_z = grad_z.to(q.dtype)
    grad_q = torch.einsum("bkgqs,bskd->bqkgd", grad_z, k).flatten(2, 3)
    grad_k = torch.einsum("bkgqs,bqkgd->bskd", grad_z, by_group(q, k))
    return grad_q, grad_k, grad_v


# %% 07.7 forward: fake: PyTorch's attention, and no lse
def plain_forward(q, k, v, causal):
    of_heads = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(*of_heads, is_causal=causal, enable_gqa=True).transpose(1, 2)
    return out, torch.zeros_like(out[..., 0])


def plain_backward(gradient, q, k, v, out, lse, causal):
    def of_rows(x):
        return by_group(x, k).permute(0, 2, 3, 1)

    p = (scores(q, k, causal) - of_rows(lse)[..., None]).exp()
    grad = by_group(gradient, k)
    grad_v = torch.einsum("bkgqs,bqkgd->bskd", p.to(grad.dtype), grad)
    grad_p = torch.einsum("bqkgd,bskd->bkgqs", grad, v)
    grad_z = p * (grad_p - of_rows((gradient * out).sum(-1))[..., None]) / math.sqrt(q.shape[-1])
    grad_z = grad_z.to(q.dtype)
    grad_q = torch.einsum("bkgqs,bskd->bqkgd", grad_z, k).flatten(2, 3)
    grad_k = torch.einsum("bkgqs,bqkgd->bskd", grad_z, by_group(q, k))
    return grad_q, grad_k, grad_v


# %% 07.7 fake: backward by autograd through the block alone
def plain_forward(q, k, v, causal):
    z = scores(q, k, causal)
    lse = z.logsumexp(-1)
    p = (z - lse[..., None]).exp().to(v.dtype)
    out = torch.einsum("bkgqs,bskd->bqkgd", p, v).flatten(2, 3)
    return out, lse.permute(0, 3, 1, 2).flatten(2)


def plain_backward(gradient, q, k, v, out, lse, causal):
    with torch.enable_grad():
        tensors = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(plain_forward(*tensors, causal)[0], tensors, gradient)


# %% 07.7 the maximum begins at 0
def plain_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """out [b, s, a, d] and lse [b, s, a] of a block, by plain products: all its scores are there at once."""
    z = scores(q, k, causal)
    m = z.amax(-1).clamp(min=0)
    lse = (z - m[..., None]).exp().sum(-1).log() + m  # [b, kv, g, s]
    p = (z - lse[..., None]).exp().to(v.dtype)
    out = torch.einsum("bkgqs,bskd->bqkgd", p, v).flatten(2, 3)
    return out, lse.permute(0, 3, 1, 2).flatten(2)


def plain_backward(gradient, q, k, v, out, lse, causal: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v through this block; out and lse are those of all blocks together, gradient is out's."""

    def of_rows(x: torch.Tensor) -> torch.Tensor:  # [b, s, a] as [b, kv, g, s]
        return by_group(x, k).permute(0, 2, 3, 1)

    p = (scores(q, k, causal) - of_rows(lse)[..., None]).exp()
    grad = by_group(gradient, k)
    grad_v = torch.einsum("bkgqs,bqkgd->bskd", p.to(grad.dtype), grad)
    grad_p = torch.einsum("bqkgd,bskd->bkgqs", grad.to(p.dtype), v.to(p.dtype))
    row_sums = of_rows((gradient.to(p.dtype) * out).sum(-1))  # D
    grad_z = (p * (grad_p - row_sums[..., None]) / math.sqrt(q.shape[-1])).to(q.dtype)
    grad_q = torch.einsum("bkgqs,bskd->bqkgd", grad_z, k).flatten(2, 3)
    grad_k = torch.einsum("bkgqs,bqkgd->bskd", grad_z, by_group(q, k))
    return grad_q, grad_k, grad_v


# %% 07.8 the own chunks without a mask
import itertools

from course_lib.context_parallel.blocks import Piece


def visible(own, other, causal=True):
    if not causal or own == other:
        return [Piece(slice(0, len(own)), slice(0, len(other)), False)]
    pieces, below = [], [sum(chunk < mine for chunk in other) for mine in own]
    for count, rows in itertools.groupby(range(len(own)), below.__getitem__):
        rows = list(rows)
        if count:
            pieces.append(Piece(slice(rows[0], rows[-1] + 1), slice(0, count), False))
    return pieces


# %% 07.8 forgets the own chunks' causal pieces
import itertools

from course_lib.context_parallel.blocks import Piece


def visible(own, other, causal=True):
    if not causal:
        return [Piece(slice(0, len(own)), slice(0, len(other)), causal)]
    pieces, below = [], [sum(chunk < mine for chunk in other) for mine in own]
    for count, rows in itertools.groupby(range(len(own)), below.__getitem__):
        rows = list(rows)
        if count:
            pieces.append(Piece(slice(rows[0], rows[-1] + 1), slice(0, count), False))
    return pieces


# %% 07.8 own and other the same: several pieces
import itertools

from course_lib.context_parallel.blocks import Piece


def visible(own, other, causal=True):
    if not causal:
        return [Piece(slice(0, len(own)), slice(0, len(other)), causal)]
    pieces, below = [], [sum(chunk < mine for chunk in other) for mine in own]
    if own == other:
        pieces = [Piece(slice(i, i + 1), slice(i, i + 1), True) for i in range(len(own))]
    for count, rows in itertools.groupby(range(len(own)), below.__getitem__):
        rows = list(rows)
        if count:
            pieces.append(Piece(slice(rows[0], rows[-1] + 1), slice(0, count), False))
    return pieces


# %% 07.8 a piece for each pair of chunks
import itertools

from course_lib.context_parallel.blocks import Piece


def visible(own, other, causal=True):
    if not causal or own == other:
        return [Piece(slice(0, len(own)), slice(0, len(other)), causal)]
    pairs = itertools.product(range(len(own)), range(len(other)))
    return [Piece(slice(i, i + 1), slice(j, j + 1), False) for i, j in pairs if other[j] < own[i]]


# %% 07.8 a piece for each chunk of queries
import itertools

from course_lib.context_parallel.blocks import Piece


def visible(own, other, causal=True):
    if not causal or own == other:
        return [Piece(slice(0, len(own)), slice(0, len(other)), causal)]
    below = [sum(chunk < mine for chunk in other) for mine in own]
    return [Piece(slice(i, i + 1), slice(0, count), False) for i, count in enumerate(below) if count]


# %% 07.8 numbers of chunks instead of places
import itertools

from course_lib.context_parallel.blocks import Piece


def visible(own, other, causal=True):
    if not causal or own == other:
        return [Piece(slice(0, len(own)), slice(0, len(other)), causal)]
    pieces, below = [], [sum(chunk < mine for chunk in other) for mine in own]
    for count, rows in itertools.groupby(range(len(own)), below.__getitem__):
        rows = list(rows)
        if count:
            pieces.append(Piece(slice(own[rows[0]], own[rows[-1]] + 1), slice(0, other[count - 1] + 1), False))
    return pieces


# %% 07.8 not causal: still causal
import itertools

from course_lib.context_parallel.blocks import Piece


def visible(own, other, causal=True):
    if own == other:
        return [Piece(slice(0, len(own)), slice(0, len(other)), causal)]
    pieces, below = [], [sum(chunk < mine for chunk in other) for mine in own]
    for count, rows in itertools.groupby(range(len(own)), below.__getitem__):
        rows = list(rows)
        if count:
            pieces.append(Piece(slice(rows[0], rows[-1] + 1), slice(0, count), False))
    return pieces


# %% 07.8 whole parts only: all of an earlier rank, nothing of a later one
import itertools

from course_lib.context_parallel.blocks import Piece


def visible(own, other, causal=True):
    if not causal or own == other:
        return [Piece(slice(0, len(own)), slice(0, len(other)), causal)]
    if other[0] < own[0]:
        return [Piece(slice(0, len(own)), slice(0, len(other)), False)]
    return []


# %% 07.8 fake: everything, for all queries
import itertools

from course_lib.context_parallel.blocks import Piece


def visible(own, other, causal=True):
    return [Piece(slice(0, len(own)), slice(0, len(other)), causal and own == other)]


# %% 07.9 fake: an all-gather, and the loop over what it brought
import torch
import torch.distributed as dist

from course_lib.context_parallel.attention import start_exchange


def ring_forward(q, k, v, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own = chunks_of(rank, n, order)
    chunk, (out, lse) = q.shape[1] // len(own), nothing_seen(q)
    parts, work = start_gather(torch.stack([k, v]), group)
    work.wait()
    for step in range(n):
        pieces = visible(own, chunks_of((rank - step) % n, n, order), causal)
        attend(q, *parts[(rank - step) % n], in_tokens(pieces, chunk), attention, out, lse)
    return out.to(q.dtype), lse


# %% 07.9 fake: an all-gather hidden behind a ring for show
import torch
import torch.distributed as dist

from course_lib.context_parallel.attention import start_exchange


def ring_forward(q, k, v, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own = chunks_of(rank, n, order)
    chunk, kv, (out, lse) = q.shape[1] // len(own), torch.stack([k, v]), nothing_seen(q)
    parts, work = start_gather(kv, group)
    work.wait()
    for step in range(n):
        arriving, works = start_exchange(kv, group) if step < n - 1 else (None, [])
        pieces = visible(own, chunks_of((rank - step) % n, n, order), causal)
        attend(q, *parts[(rank - step) % n], in_tokens(pieces, chunk), attention, out, lse)
        for work in works:
            work.wait()
        kv = arriving
    return out.to(q.dtype), lse


# %% 07.9 waits before it attends
import torch
import torch.distributed as dist

from course_lib.context_parallel.attention import start_exchange


def ring_forward(q, k, v, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own = chunks_of(rank, n, order)
    chunk, kv, (out, lse) = q.shape[1] // len(own), torch.stack([k, v]), nothing_seen(q)
    for step in range(n):
        arriving, works = start_exchange(kv, group) if step < n - 1 else (None, [])
        for work in works:
            work.wait()
        pieces = visible(own, chunks_of((rank - step) % n, n, order), causal)
        attend(q, *kv, in_tokens(pieces, chunk), attention, out, lse)
        kv = arriving
    return out.to(q.dtype), lse


# %% 07.9 collects all parts first, and attends at the end
import torch
import torch.distributed as dist

from course_lib.context_parallel.attention import start_exchange


def ring_forward(q, k, v, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own = chunks_of(rank, n, order)
    chunk, kv, (out, lse) = q.shape[1] // len(own), torch.stack([k, v]), nothing_seen(q)
    parts = []
    for step in range(n):
        arriving, works = start_exchange(kv, group) if step < n - 1 else (None, [])
        parts.append(kv)
        for work in works:
            work.wait()
        kv = arriving
    for step, kv in enumerate(parts):
        pieces = visible(own, chunks_of((rank - step) % n, n, order), causal)
        attend(q, *kv, in_tokens(pieces, chunk), attention, out, lse)
    return out.to(q.dtype), lse


# %% 07.9 four times the bytes
import torch
import torch.distributed as dist

from course_lib.context_parallel.attention import start_exchange


def ring_forward(q, k, v, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own = chunks_of(rank, n, order)
    chunk, kv, (out, lse) = q.shape[1] // len(own), torch.stack([k, v] * 4), nothing_seen(q)
    for step in range(n):
        arriving, works = start_exchange(kv, group) if step < n - 1 else (None, [])
        pieces = visible(own, chunks_of((rank - step) % n, n, order), causal)
        attend(q, *kv[:2], in_tokens(pieces, chunk), attention, out, lse)
        for work in works:
            work.wait()
        kv = arriving
    return out.to(q.dtype), lse


# %% 07.9 k and v travel apart
import torch
import torch.distributed as dist

from course_lib.context_parallel.attention import start_exchange


def ring_forward(q, k, v, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own = chunks_of(rank, n, order)
    chunk, kv, (out, lse) = q.shape[1] // len(own), (k, v), nothing_seen(q)
    for step in range(n):
        arriving, works = [], []
        for tensor in kv if step < n - 1 else ():
            part, work = start_exchange(tensor, group)
            arriving, works = [*arriving, part], [*works, *work]
        pieces = visible(own, chunks_of((rank - step) % n, n, order), causal)
        attend(q, *kv, in_tokens(pieces, chunk), attention, out, lse)
        for work in works:
            work.wait()
        kv = arriving
    return out.to(q.dtype), lse


# %% 07.9 an exchange too many
import torch
import torch.distributed as dist

from course_lib.context_parallel.attention import start_exchange


def ring_forward(q, k, v, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own = chunks_of(rank, n, order)
    chunk, kv, (out, lse) = q.shape[1] // len(own), torch.stack([k, v]), nothing_seen(q)
    for step in range(n):
        arriving, works = start_exchange(kv, group)
        pieces = visible(own, chunks_of((rank - step) % n, n, order), causal)
        attend(q, *kv, in_tokens(pieces, chunk), attention, out, lse)
        for work in works:
            work.wait()
        kv = arriving
    return out.to(q.dtype), lse


# %% 07.9 sends to the rank before
import torch
import torch.distributed as dist


def start_exchange(tensor, group):
    arriving, rank, n = torch.empty_like(tensor), group.rank(), group.size()
    send = dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank - 1) % n)
    receive = dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank + 1) % n)
    return arriving, dist.batch_isend_irecv([send, receive])


def ring_forward(q, k, v, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own = chunks_of(rank, n, order)
    chunk, kv, (out, lse) = q.shape[1] // len(own), torch.stack([k, v]), nothing_seen(q)
    for step in range(n):
        arriving, works = start_exchange(kv, group) if step < n - 1 else (None, [])
        pieces = visible(own, chunks_of((rank + step) % n, n, order), causal)
        attend(q, *kv, in_tokens(pieces, chunk), attention, out, lse)
        for work in works:
            work.wait()
        kv = arriving
    return out.to(q.dtype), lse


# %% 07.9 takes what arrives for the next rank's
import torch
import torch.distributed as dist

from course_lib.context_parallel.attention import start_exchange


def ring_forward(q, k, v, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own = chunks_of(rank, n, order)
    chunk, kv, (out, lse) = q.shape[1] // len(own), torch.stack([k, v]), nothing_seen(q)
    for step in range(n):
        arriving, works = start_exchange(kv, group) if step < n - 1 else (None, [])
        pieces = visible(own, chunks_of((rank + step) % n, n, order), causal)
        attend(q, *kv, in_tokens(pieces, chunk), attention, out, lse)
        for work in works:
            work.wait()
        kv = arriving
    return out.to(q.dtype), lse


# %% 07.9 fake: all keys, whole, on every rank
import torch
import torch.distributed as dist

from course_lib.context_parallel.attention import start_exchange


def ring_forward(q, k, v, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own = chunks_of(rank, n, order)
    chunk, kv, (out, lse) = q.shape[1] // len(own), torch.stack([k, v]), nothing_seen(q)
    for step in range(n):
        arriving, works = start_exchange(kv, group) if step < n - 1 else (None, [])
        source = chunks_of((rank - step) % n, n, order)
        whole = slice(0, q.shape[1])
        part, part_lse = nothing_seen(q)
        attend(q, *kv, [in_tokens(visible(own, source, False), chunk)[0]], attention, part, part_lse)
        for rows, columns, inside in in_tokens(visible(own, source, causal), chunk):
            attend(q, *kv, [(rows, columns, inside)], attention, out, lse)
        for work in works:
            work.wait()
        kv = arriving
    return out.to(q.dtype), lse


# %% 07.9 contiguous posing as zig-zag
import torch
import torch.distributed as dist

from course_lib.context_parallel.attention import start_exchange


def ring_forward(q, k, v, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own = chunks_of(rank, n, "contiguous")
    chunk, kv, (out, lse) = q.shape[1] // len(own), torch.stack([k, v]), nothing_seen(q)
    for step in range(n):
        arriving, works = start_exchange(kv, group) if step < n - 1 else (None, [])
        pieces = visible(own, chunks_of((rank - step) % n, n, "contiguous"), causal)
        attend(q, *kv, in_tokens(pieces, chunk), attention, out, lse)
        for work in works:
            work.wait()
        kv = arriving
    return out.to(q.dtype), lse


# %% 07.10 the gradients of k and v stay where they are made
def ring_backward(gradient, q, k, v, out, lse, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own = chunks_of(rank, n, order)
    chunk, kv = q.shape[1] // len(own), torch.stack([k, v])
    grad_q, at_home, passing, on_their_way = torch.zeros_like(q, dtype=lse.dtype), None, None, []
    for step in range(n):
        arriving, works = start_exchange(kv, group) if step < n - 1 else (None, [])
        pieces = in_tokens(visible(own, chunks_of((rank - step) % n, n, order), causal), chunk)
        grad_kv = torch.zeros_like(kv, dtype=lse.dtype)
        attend_backward(gradient, q, *kv, out, lse, pieces, attention, grad_q, *grad_kv)
        at_home = grad_kv if step == 0 else at_home + grad_kv
        for work in works:
            work.wait()
        kv = arriving
    return grad_q.to(q.dtype), *at_home.to(k.dtype)


# %% 07.10 the last hop home is missing
def ring_backward(gradient, q, k, v, out, lse, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own = chunks_of(rank, n, order)
    chunk, kv = q.shape[1] // len(own), torch.stack([k, v])
    grad_q, at_home, passing, on_their_way = torch.zeros_like(q, dtype=lse.dtype), None, None, []
    for step in range(n):
        arriving, works = start_exchange(kv, group) if step < n - 1 else (None, [])
        pieces = in_tokens(visible(own, chunks_of((rank - step) % n, n, order), causal), chunk)
        grad_kv = torch.zeros_like(kv, dtype=lse.dtype)
        attend_backward(gradient, q, *kv, out, lse, pieces, attention, grad_q, *grad_kv)
        if step == 0:
            at_home = grad_kv
        else:
            for work in on_their_way:
                work.wait()
            if passing is not None:
                grad_kv += passing
            passing, on_their_way = start_exchange(grad_kv, group) if step < n - 1 else (grad_kv, [])
        for work in works:
            work.wait()
        kv = arriving
    for work in on_their_way:
        work.wait()
    if passing is not None:
        at_home += passing
    return grad_q.to(q.dtype), *at_home.to(k.dtype)


# %% 07.10 the own share is forgotten
def ring_backward(gradient, q, k, v, out, lse, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own = chunks_of(rank, n, order)
    chunk, kv = q.shape[1] // len(own), torch.stack([k, v])
    grad_q, at_home, passing, on_their_way = torch.zeros_like(q, dtype=lse.dtype), None, None, []
    for step in range(n):
        arriving, works = start_exchange(kv, group) if step < n - 1 else (None, [])
        pieces = in_tokens(visible(own, chunks_of((rank - step) % n, n, order), causal), chunk)
        grad_kv = torch.zeros_like(kv, dtype=lse.dtype)
        attend_backward(gradient, q, *kv, out, lse, pieces, attention, grad_q, *grad_kv)
        if step == 0:
            at_home = grad_kv
        else:
            for work in on_their_way:
                work.wait()
            if passing is not None:
                grad_kv += passing
            passing, on_their_way = start_exchange(grad_kv, group)
        for work in works:
            work.wait()
        kv = arriving
    for work in on_their_way:
        work.wait()
    if passing is not None:
        at_home = passing
    return grad_q.to(q.dtype), *at_home.to(k.dtype)


# %% 07.10 fake: an all-gather and a reduce-scatter
def ring_backward(gradient, q, k, v, out, lse, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own = chunks_of(rank, n, order)
    chunk, grad_q = q.shape[1] // len(own), torch.zeros_like(q, dtype=lse.dtype)
    parts, work = start_gather(torch.stack([k, v]), group)
    work.wait()
    grads = torch.zeros_like(parts, dtype=lse.dtype)
    for source in range(n):
        pieces = in_tokens(visible(own, chunks_of(source, n, order), causal), chunk)
        attend_backward(gradient, q, *parts[source], out, lse, pieces, attention, grad_q, *grads[source])
    at_home, work = start_reduce_scatter(grads, group)
    work.wait()
    return grad_q.to(q.dtype), *at_home.to(k.dtype)


# %% 07.10 fake: the ring for the keys, an all-reduce for their gradients
def ring_backward(gradient, q, k, v, out, lse, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own = chunks_of(rank, n, order)
    chunk, kv = q.shape[1] // len(own), torch.stack([k, v])
    grad_q, at_home, passing, on_their_way = torch.zeros_like(q, dtype=lse.dtype), None, None, []
    grads = torch.zeros(n, *kv.shape, dtype=lse.dtype)
    for step in range(n):
        arriving, works = start_exchange(kv, group) if step < n - 1 else (None, [])
        pieces = in_tokens(visible(own, chunks_of((rank - step) % n, n, order), causal), chunk)
        grad_kv = torch.zeros_like(kv, dtype=lse.dtype)
        attend_backward(gradient, q, *kv, out, lse, pieces, attention, grad_q, *grad_kv)
        grads[(rank - step) % n] = grad_kv
        for work in works:
            work.wait()
        kv = arriving
    dist.all_reduce(grads, group=group)
    return grad_q.to(q.dtype), *grads[rank].to(k.dtype)


# %% 07.10 waits for keys and values before it attends
def ring_backward(gradient, q, k, v, out, lse, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own = chunks_of(rank, n, order)
    chunk, kv = q.shape[1] // len(own), torch.stack([k, v])
    grad_q, at_home, passing, on_their_way = torch.zeros_like(q, dtype=lse.dtype), None, None, []
    for step in range(n):
        arriving, works = start_exchange(kv, group) if step < n - 1 else (None, [])
        for work in works:
            work.wait()
        pieces = in_tokens(visible(own, chunks_of((rank - step) % n, n, order), causal), chunk)
        grad_kv = torch.zeros_like(kv, dtype=lse.dtype)
        attend_backward(gradient, q, *kv, out, lse, pieces, attention, grad_q, *grad_kv)
        if step == 0:
            at_home = grad_kv
        else:
            for work in on_their_way:
                work.wait()
            if passing is not None:
                grad_kv += passing
            passing, on_their_way = start_exchange(grad_kv, group)
        kv = arriving
    for work in on_their_way:
        work.wait()
    if passing is not None:
        at_home += passing
    return grad_q.to(q.dtype), *at_home.to(k.dtype)


# %% 07.10 waits for each sum at once
def ring_backward(gradient, q, k, v, out, lse, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own = chunks_of(rank, n, order)
    chunk, kv = q.shape[1] // len(own), torch.stack([k, v])
    grad_q, at_home, passing, on_their_way = torch.zeros_like(q, dtype=lse.dtype), None, None, []
    for step in range(n):
        arriving, works = start_exchange(kv, group) if step < n - 1 else (None, [])
        pieces = in_tokens(visible(own, chunks_of((rank - step) % n, n, order), causal), chunk)
        grad_kv = torch.zeros_like(kv, dtype=lse.dtype)
        attend_backward(gradient, q, *kv, out, lse, pieces, attention, grad_q, *grad_kv)
        if step == 0:
            at_home = grad_kv
        else:
            for work in on_their_way:
                work.wait()
            if passing is not None:
                grad_kv += passing
            passing, on_their_way = start_exchange(grad_kv, group)
            for work in on_their_way:
                work.wait()
            on_their_way = []
        for work in works:
            work.wait()
        kv = arriving
    for work in on_their_way:
        work.wait()
    if passing is not None:
        at_home += passing
    return grad_q.to(q.dtype), *at_home.to(k.dtype)


# %% 07.10 sums in the dtype of k
def ring_backward(gradient, q, k, v, out, lse, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own = chunks_of(rank, n, order)
    chunk, kv = q.shape[1] // len(own), torch.stack([k, v])
    grad_q, at_home, passing, on_their_way = torch.zeros_like(q, dtype=lse.dtype), None, None, []
    for step in range(n):
        arriving, works = start_exchange(kv, group) if step < n - 1 else (None, [])
        pieces = in_tokens(visible(own, chunks_of((rank - step) % n, n, order), causal), chunk)
        grad_kv = torch.zeros_like(kv)
        attend_backward(gradient, q, *kv, out, lse, pieces, attention, grad_q, *grad_kv)
        if step == 0:
            at_home = grad_kv
        else:
            for work in on_their_way:
                work.wait()
            if passing is not None:
                grad_kv += passing
            passing, on_their_way = start_exchange(grad_kv, group)
        for work in works:
            work.wait()
        kv = arriving
    for work in on_their_way:
        work.wait()
    if passing is not None:
        at_home += passing
    return grad_q.to(q.dtype), *at_home.to(k.dtype)


# %% 07.10 gradients in float32, whatever k is
def ring_backward(gradient, q, k, v, out, lse, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own = chunks_of(rank, n, order)
    chunk, kv = q.shape[1] // len(own), torch.stack([k, v])
    grad_q, at_home, passing, on_their_way = torch.zeros_like(q, dtype=lse.dtype), None, None, []
    for step in range(n):
        arriving, works = start_exchange(kv, group) if step < n - 1 else (None, [])
        pieces = in_tokens(visible(own, chunks_of((rank - step) % n, n, order), causal), chunk)
        grad_kv = torch.zeros_like(kv, dtype=lse.dtype)
        attend_backward(gradient, q, *kv, out, lse, pieces, attention, grad_q, *grad_kv)
        if step == 0:
            at_home = grad_kv
        else:
            for work in on_their_way:
                work.wait()
            if passing is not None:
                grad_kv += passing
            passing, on_their_way = start_exchange(grad_kv, group)
        for work in works:
            work.wait()
        kv = arriving
    for work in on_their_way:
        work.wait()
    if passing is not None:
        at_home += passing
    return grad_q, *at_home


# %% 07.10 gradients of k and v travel apart
def ring_backward(gradient, q, k, v, out, lse, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own = chunks_of(rank, n, order)
    chunk, kv = q.shape[1] // len(own), torch.stack([k, v])
    grad_q, at_home, passing, on_their_way = torch.zeros_like(q, dtype=lse.dtype), None, None, []
    for step in range(n):
        arriving, works = start_exchange(kv, group) if step < n - 1 else (None, [])
        pieces = in_tokens(visible(own, chunks_of((rank - step) % n, n, order), causal), chunk)
        grad_kv = torch.zeros_like(kv, dtype=lse.dtype)
        attend_backward(gradient, q, *kv, out, lse, pieces, attention, grad_q, *grad_kv)
        if step == 0:
            at_home = grad_kv
        else:
            for work in on_their_way:
                work.wait()
            if passing is not None:
                grad_kv += torch.stack(passing)
            (of_k, first), (of_v, second) = (start_exchange(each.clone(), group) for each in grad_kv)
            passing, on_their_way = [of_k, of_v], [*first, *second]
        for work in works:
            work.wait()
        kv = arriving
    for work in on_their_way:
        work.wait()
    if passing is not None:
        at_home += torch.stack(passing)
    return grad_q.to(q.dtype), *at_home.to(k.dtype)


# %% 07.10 each part with an lse of its own
def ring_backward(gradient, q, k, v, out, lse, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own = chunks_of(rank, n, order)
    chunk, kv = q.shape[1] // len(own), torch.stack([k, v])
    grad_q, at_home, passing, on_their_way = torch.zeros_like(q, dtype=lse.dtype), None, None, []
    for step in range(n):
        arriving, works = start_exchange(kv, group) if step < n - 1 else (None, [])
        pieces = in_tokens(visible(own, chunks_of((rank - step) % n, n, order), causal), chunk)
        grad_kv = torch.zeros_like(kv, dtype=lse.dtype)
        part, own_lse = nothing_seen(q)
        attend(q, *kv, pieces, attention, part, own_lse)
        attend_backward(gradient, q, *kv, out, own_lse.nan_to_num(neginf=0.0), pieces, attention, grad_q, *grad_kv)
        if step == 0:
            at_home = grad_kv
        else:
            for work in on_their_way:
                work.wait()
            if passing is not None:
                grad_kv += passing
            passing, on_their_way = start_exchange(grad_kv, group)
        for work in works:
            work.wait()
        kv = arriving
    for work in on_their_way:
        work.wait()
    if passing is not None:
        at_home += passing
    return grad_q.to(q.dtype), *at_home.to(k.dtype)


# %% 07.11 contiguous posing as zig-zag
def to_zigzag(whole, ranks):
    return whole.clone()


def from_zigzag(split, ranks):
    return split.clone()


# %% 07.11 chunks r and n + r
def to_zigzag(whole, ranks):
    first, second = whole.unflatten(1, (2, ranks, -1)).unbind(1)
    return torch.stack([first, second], dim=2).flatten(1, 3)


def from_zigzag(split, ranks):
    early, late = split.unflatten(1, (ranks, 2, -1)).unbind(2)
    return torch.cat([early, late], dim=1).flatten(1, 2)


# %% 07.11 the tokens of a late chunk are reversed too
def to_zigzag(whole, ranks):
    first, second = whole.unflatten(1, (2, ranks, -1)).unbind(1)
    return torch.stack([first, second.flip(1, 2)], dim=2).flatten(1, 3)


def from_zigzag(split, ranks):
    early, late = split.unflatten(1, (ranks, 2, -1)).unbind(2)
    return torch.cat([early, late.flip(1, 2)], dim=1).flatten(1, 2)


# %% 07.11 striped: a token for each rank in turn
def to_zigzag(whole, ranks):
    return whole.unflatten(1, (-1, ranks)).transpose(1, 2).flatten(1, 2)


def from_zigzag(split, ranks):
    return split.unflatten(1, (ranks, -1)).transpose(1, 2).flatten(1, 2)


# %% 07.11 neighbouring chunks
def to_zigzag(whole, ranks):
    first, second = whole.unflatten(1, (2, ranks, -1)).unbind(1)
    return torch.cat([first, second.flip(1)], dim=1).flatten(1, 2)


def from_zigzag(split, ranks):
    early, late = split.unflatten(1, (2, ranks, -1)).unbind(1)
    return torch.cat([early, late.flip(1)], dim=1).flatten(1, 2)


# %% 07.11 from_zigzag is to_zigzag
def to_zigzag(whole, ranks):
    first, second = whole.unflatten(1, (2, ranks, -1)).unbind(1)
    return torch.stack([first, second.flip(1)], dim=2).flatten(1, 3)


def from_zigzag(split, ranks):
    return to_zigzag(split, ranks)


# %% 07.11 from_zigzag: late chunks are not turned round
def to_zigzag(whole, ranks):
    first, second = whole.unflatten(1, (2, ranks, -1)).unbind(1)
    return torch.stack([first, second.flip(1)], dim=2).flatten(1, 3)


def from_zigzag(split, ranks):
    early, late = split.unflatten(1, (ranks, 2, -1)).unbind(2)
    return torch.cat([early, late], dim=1).flatten(1, 2)


# %% 07.11 from_zigzag does nothing
def to_zigzag(whole, ranks):
    first, second = whole.unflatten(1, (2, ranks, -1)).unbind(1)
    return torch.stack([first, second.flip(1)], dim=2).flatten(1, 3)


def from_zigzag(split, ranks):
    return split


# %% 07.11 the late chunk first
def to_zigzag(whole, ranks):
    first, second = whole.unflatten(1, (2, ranks, -1)).unbind(1)
    return torch.stack([second.flip(1), first], dim=2).flatten(1, 3)


def from_zigzag(split, ranks):
    late, early = split.unflatten(1, (ranks, 2, -1)).unbind(2)
    return torch.cat([early, late.flip(1)], dim=1).flatten(1, 2)


# %% 07.12 forward waits before it attends
def all_gather_forward(q, k, v, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own, (out, lse) = chunks_of(rank, n, order), nothing_seen(q)
    parts, work = start_gather(torch.cat([k, v]), group)
    work.wait()
    for step in range(n):
        source = (rank - step) % n
        keys, values = (k, v) if step == 0 else parts[source].chunk(2)
        pieces = in_tokens(visible(own, chunks_of(source, n, order), causal), q.shape[1] // len(own))
        attend(q, keys, values, pieces, attention, out, lse)
    return out.to(q.dtype), lse


def all_gather_backward(gradient, q, k, v, out, lse, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own, grad_q = chunks_of(rank, n, order), torch.zeros_like(q, dtype=lse.dtype)
    parts, work = start_gather(torch.cat([k, v]), group)
    grads = parts.new_zeros(parts.shape, dtype=lse.dtype)
    for step in range(n):
        source = (rank - step) % n
        if step == 1:
            work.wait()
        keys, values = (k, v) if step == 0 else parts[source].chunk(2)
        pieces = in_tokens(visible(own, chunks_of(source, n, order), causal), q.shape[1] // len(own))
        attend_backward(gradient, q, keys, values, out, lse, pieces, attention, grad_q, *grads[source].chunk(2))
    of_own, work = start_reduce_scatter(grads, group)
    work.wait()
    return grad_q.to(q.dtype), *of_own.to(k.dtype).chunk(2)


# %% 07.12 forward: k and v are gathered apart
def all_gather_forward(q, k, v, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own, (out, lse) = chunks_of(rank, n, order), nothing_seen(q)
    (all_k, first), (all_v, work) = start_gather(k, group), start_gather(v, group)
    for step in range(n):
        source = (rank - step) % n
        if step == 1:
            first.wait()
            work.wait()
        keys, values = (k, v) if step == 0 else (all_k[source], all_v[source])
        pieces = in_tokens(visible(own, chunks_of(source, n, order), causal), q.shape[1] // len(own))
        attend(q, keys, values, pieces, attention, out, lse)
    return out.to(q.dtype), lse


def all_gather_backward(gradient, q, k, v, out, lse, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own, grad_q = chunks_of(rank, n, order), torch.zeros_like(q, dtype=lse.dtype)
    parts, work = start_gather(torch.cat([k, v]), group)
    grads = parts.new_zeros(parts.shape, dtype=lse.dtype)
    for step in range(n):
        source = (rank - step) % n
        if step == 1:
            work.wait()
        keys, values = (k, v) if step == 0 else parts[source].chunk(2)
        pieces = in_tokens(visible(own, chunks_of(source, n, order), causal), q.shape[1] // len(own))
        attend_backward(gradient, q, keys, values, out, lse, pieces, attention, grad_q, *grads[source].chunk(2))
    of_own, work = start_reduce_scatter(grads, group)
    work.wait()
    return grad_q.to(q.dtype), *of_own.to(k.dtype).chunk(2)


# %% 07.12 forward: fake: a ring
def all_gather_forward(q, k, v, group, causal, attention, order):
    return ring_forward(q, k, v, group, causal, attention, order)


def all_gather_backward(gradient, q, k, v, out, lse, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own, grad_q = chunks_of(rank, n, order), torch.zeros_like(q, dtype=lse.dtype)
    parts, work = start_gather(torch.cat([k, v]), group)
    grads = parts.new_zeros(parts.shape, dtype=lse.dtype)
    for step in range(n):
        source = (rank - step) % n
        if step == 1:
            work.wait()
        keys, values = (k, v) if step == 0 else parts[source].chunk(2)
        pieces = in_tokens(visible(own, chunks_of(source, n, order), causal), q.shape[1] // len(own))
        attend_backward(gradient, q, keys, values, out, lse, pieces, attention, grad_q, *grads[source].chunk(2))
    of_own, work = start_reduce_scatter(grads, group)
    work.wait()
    return grad_q.to(q.dtype), *of_own.to(k.dtype).chunk(2)


# %% 07.12 forward: fake: all scores of all queries, whole on every rank
def all_gather_forward(q, k, v, group, causal, attention, order):
    n = group.size()
    parts, work = start_gather(torch.cat([q, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1)]), group)
    work.wait()
    whole = to_whole(in_order(parts), n, order)
    kv = k.shape[2]
    all_q, all_k, all_v = whole.chunk(3)
    out, lse = attention.forward(all_q, all_k[:, :, :kv], all_v[:, :, :kv], causal)
    return own_tokens(out, group, order), own_tokens(lse, group, order)


def to_whole(split, n, order):
    return from_zigzag(split, n) if order == "zigzag" else split


def all_gather_backward(gradient, q, k, v, out, lse, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own, grad_q = chunks_of(rank, n, order), torch.zeros_like(q, dtype=lse.dtype)
    parts, work = start_gather(torch.cat([k, v]), group)
    grads = parts.new_zeros(parts.shape, dtype=lse.dtype)
    for step in range(n):
        source = (rank - step) % n
        if step == 1:
            work.wait()
        keys, values = (k, v) if step == 0 else parts[source].chunk(2)
        pieces = in_tokens(visible(own, chunks_of(source, n, order), causal), q.shape[1] // len(own))
        attend_backward(gradient, q, keys, values, out, lse, pieces, attention, grad_q, *grads[source].chunk(2))
    of_own, work = start_reduce_scatter(grads, group)
    work.wait()
    return grad_q.to(q.dtype), *of_own.to(k.dtype).chunk(2)


# %% 07.12 forward: all scores, then a mask
def all_gather_forward(q, k, v, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own, (out, lse) = chunks_of(rank, n, order), nothing_seen(q)
    parts, work = start_gather(torch.cat([k, v]), group)
    for step in range(n):
        source = (rank - step) % n
        if step == 1:
            work.wait()
        keys, values = (k, v) if step == 0 else parts[source].chunk(2)
        pieces = in_tokens(visible(own, chunks_of(source, n, order), causal), q.shape[1] // len(own))
        whole = slice(0, q.shape[1])
        attend(q, keys, values, [(whole, whole, False)], attention, *nothing_seen(q))
        attend(q, keys, values, pieces, attention, out, lse)
    return out.to(q.dtype), lse


def all_gather_backward(gradient, q, k, v, out, lse, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own, grad_q = chunks_of(rank, n, order), torch.zeros_like(q, dtype=lse.dtype)
    parts, work = start_gather(torch.cat([k, v]), group)
    grads = parts.new_zeros(parts.shape, dtype=lse.dtype)
    for step in range(n):
        source = (rank - step) % n
        if step == 1:
            work.wait()
        keys, values = (k, v) if step == 0 else parts[source].chunk(2)
        pieces = in_tokens(visible(own, chunks_of(source, n, order), causal), q.shape[1] // len(own))
        attend_backward(gradient, q, keys, values, out, lse, pieces, attention, grad_q, *grads[source].chunk(2))
    of_own, work = start_reduce_scatter(grads, group)
    work.wait()
    return grad_q.to(q.dtype), *of_own.to(k.dtype).chunk(2)


# %% 07.12 forward: contiguous posing as zig-zag
def all_gather_forward(q, k, v, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own, (out, lse) = chunks_of(rank, n, "contiguous"), nothing_seen(q)
    parts, work = start_gather(torch.cat([k, v]), group)
    for step in range(n):
        source = (rank - step) % n
        if step == 1:
            work.wait()
        keys, values = (k, v) if step == 0 else parts[source].chunk(2)
        pieces = in_tokens(visible(own, chunks_of(source, n, "contiguous"), causal), q.shape[1] // len(own))
        attend(q, keys, values, pieces, attention, out, lse)
    return out.to(q.dtype), lse


def all_gather_backward(gradient, q, k, v, out, lse, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own, grad_q = chunks_of(rank, n, order), torch.zeros_like(q, dtype=lse.dtype)
    parts, work = start_gather(torch.cat([k, v]), group)
    grads = parts.new_zeros(parts.shape, dtype=lse.dtype)
    for step in range(n):
        source = (rank - step) % n
        if step == 1:
            work.wait()
        keys, values = (k, v) if step == 0 else parts[source].chunk(2)
        pieces = in_tokens(visible(own, chunks_of(source, n, order), causal), q.shape[1] // len(own))
        attend_backward(gradient, q, keys, values, out, lse, pieces, attention, grad_q, *grads[source].chunk(2))
    of_own, work = start_reduce_scatter(grads, group)
    work.wait()
    return grad_q.to(q.dtype), *of_own.to(k.dtype).chunk(2)


# %% 07.12 backward waits before it attends
def all_gather_forward(q, k, v, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own, (out, lse) = chunks_of(rank, n, order), nothing_seen(q)
    parts, work = start_gather(torch.cat([k, v]), group)
    for step in range(n):
        source = (rank - step) % n
        if step == 1:
            work.wait()
        keys, values = (k, v) if step == 0 else parts[source].chunk(2)
        pieces = in_tokens(visible(own, chunks_of(source, n, order), causal), q.shape[1] // len(own))
        attend(q, keys, values, pieces, attention, out, lse)
    return out.to(q.dtype), lse


def all_gather_backward(gradient, q, k, v, out, lse, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own, grad_q = chunks_of(rank, n, order), torch.zeros_like(q, dtype=lse.dtype)
    parts, work = start_gather(torch.cat([k, v]), group)
    grads = parts.new_zeros(parts.shape, dtype=lse.dtype)
    work.wait()
    for step in range(n):
        source = (rank - step) % n
        keys, values = (k, v) if step == 0 else parts[source].chunk(2)
        pieces = in_tokens(visible(own, chunks_of(source, n, order), causal), q.shape[1] // len(own))
        attend_backward(gradient, q, keys, values, out, lse, pieces, attention, grad_q, *grads[source].chunk(2))
    of_own, work = start_reduce_scatter(grads, group)
    work.wait()
    return grad_q.to(q.dtype), *of_own.to(k.dtype).chunk(2)


# %% 07.12 backward: gradients of k and v stay where they are made
def all_gather_forward(q, k, v, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own, (out, lse) = chunks_of(rank, n, order), nothing_seen(q)
    parts, work = start_gather(torch.cat([k, v]), group)
    for step in range(n):
        source = (rank - step) % n
        if step == 1:
            work.wait()
        keys, values = (k, v) if step == 0 else parts[source].chunk(2)
        pieces = in_tokens(visible(own, chunks_of(source, n, order), causal), q.shape[1] // len(own))
        attend(q, keys, values, pieces, attention, out, lse)
    return out.to(q.dtype), lse


def all_gather_backward(gradient, q, k, v, out, lse, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own, grad_q = chunks_of(rank, n, order), torch.zeros_like(q, dtype=lse.dtype)
    parts, work = start_gather(torch.cat([k, v]), group)
    grads = parts.new_zeros(parts.shape, dtype=lse.dtype)
    for step in range(n):
        source = (rank - step) % n
        if step == 1:
            work.wait()
        keys, values = (k, v) if step == 0 else parts[source].chunk(2)
        pieces = in_tokens(visible(own, chunks_of(source, n, order), causal), q.shape[1] // len(own))
        attend_backward(gradient, q, keys, values, out, lse, pieces, attention, grad_q, *grads[source].chunk(2))
    of_own = grads[rank]
    return grad_q.to(q.dtype), *of_own.to(k.dtype).chunk(2)


# %% 07.12 backward: all-reduces all gradients, and cuts
def all_gather_forward(q, k, v, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own, (out, lse) = chunks_of(rank, n, order), nothing_seen(q)
    parts, work = start_gather(torch.cat([k, v]), group)
    for step in range(n):
        source = (rank - step) % n
        if step == 1:
            work.wait()
        keys, values = (k, v) if step == 0 else parts[source].chunk(2)
        pieces = in_tokens(visible(own, chunks_of(source, n, order), causal), q.shape[1] // len(own))
        attend(q, keys, values, pieces, attention, out, lse)
    return out.to(q.dtype), lse


def all_gather_backward(gradient, q, k, v, out, lse, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own, grad_q = chunks_of(rank, n, order), torch.zeros_like(q, dtype=lse.dtype)
    parts, work = start_gather(torch.cat([k, v]), group)
    grads = parts.new_zeros(parts.shape, dtype=lse.dtype)
    for step in range(n):
        source = (rank - step) % n
        if step == 1:
            work.wait()
        keys, values = (k, v) if step == 0 else parts[source].chunk(2)
        pieces = in_tokens(visible(own, chunks_of(source, n, order), causal), q.shape[1] // len(own))
        attend_backward(gradient, q, keys, values, out, lse, pieces, attention, grad_q, *grads[source].chunk(2))
    dist.all_reduce(grads, group=group)
    of_own = grads[rank]
    return grad_q.to(q.dtype), *of_own.to(k.dtype).chunk(2)


# %% 07.12 backward: gathers k and v twice
def all_gather_forward(q, k, v, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own, (out, lse) = chunks_of(rank, n, order), nothing_seen(q)
    parts, work = start_gather(torch.cat([k, v]), group)
    for step in range(n):
        source = (rank - step) % n
        if step == 1:
            work.wait()
        keys, values = (k, v) if step == 0 else parts[source].chunk(2)
        pieces = in_tokens(visible(own, chunks_of(source, n, order), causal), q.shape[1] // len(own))
        attend(q, keys, values, pieces, attention, out, lse)
    return out.to(q.dtype), lse


def all_gather_backward(gradient, q, k, v, out, lse, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own, grad_q = chunks_of(rank, n, order), torch.zeros_like(q, dtype=lse.dtype)
    parts, work = start_gather(torch.cat([k, v]), group)
    work.wait()
    parts, work = start_gather(torch.cat([k, v]), group)
    grads = parts.new_zeros(parts.shape, dtype=lse.dtype)
    for step in range(n):
        source = (rank - step) % n
        if step == 1:
            work.wait()
        keys, values = (k, v) if step == 0 else parts[source].chunk(2)
        pieces = in_tokens(visible(own, chunks_of(source, n, order), causal), q.shape[1] // len(own))
        attend_backward(gradient, q, keys, values, out, lse, pieces, attention, grad_q, *grads[source].chunk(2))
    of_own, work = start_reduce_scatter(grads, group)
    work.wait()
    return grad_q.to(q.dtype), *of_own.to(k.dtype).chunk(2)


# %% 07.12 backward: sums in the dtype of k
def all_gather_forward(q, k, v, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own, (out, lse) = chunks_of(rank, n, order), nothing_seen(q)
    parts, work = start_gather(torch.cat([k, v]), group)
    for step in range(n):
        source = (rank - step) % n
        if step == 1:
            work.wait()
        keys, values = (k, v) if step == 0 else parts[source].chunk(2)
        pieces = in_tokens(visible(own, chunks_of(source, n, order), causal), q.shape[1] // len(own))
        attend(q, keys, values, pieces, attention, out, lse)
    return out.to(q.dtype), lse


def all_gather_backward(gradient, q, k, v, out, lse, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own, grad_q = chunks_of(rank, n, order), torch.zeros_like(q, dtype=lse.dtype)
    parts, work = start_gather(torch.cat([k, v]), group)
    grads = parts.new_zeros(parts.shape, dtype=k.dtype)
    for step in range(n):
        source = (rank - step) % n
        if step == 1:
            work.wait()
        keys, values = (k, v) if step == 0 else parts[source].chunk(2)
        pieces = in_tokens(visible(own, chunks_of(source, n, order), causal), q.shape[1] // len(own))
        attend_backward(gradient, q, keys, values, out, lse, pieces, attention, grad_q, *grads[source].chunk(2))
    of_own, work = start_reduce_scatter(grads, group)
    work.wait()
    return grad_q.to(q.dtype), *of_own.to(k.dtype).chunk(2)


# %% 07.12 backward does not wait for the sums
def all_gather_forward(q, k, v, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own, (out, lse) = chunks_of(rank, n, order), nothing_seen(q)
    parts, work = start_gather(torch.cat([k, v]), group)
    for step in range(n):
        source = (rank - step) % n
        if step == 1:
            work.wait()
        keys, values = (k, v) if step == 0 else parts[source].chunk(2)
        pieces = in_tokens(visible(own, chunks_of(source, n, order), causal), q.shape[1] // len(own))
        attend(q, keys, values, pieces, attention, out, lse)
    return out.to(q.dtype), lse


def all_gather_backward(gradient, q, k, v, out, lse, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    own, grad_q = chunks_of(rank, n, order), torch.zeros_like(q, dtype=lse.dtype)
    parts, work = start_gather(torch.cat([k, v]), group)
    grads = parts.new_zeros(parts.shape, dtype=lse.dtype)
    for step in range(n):
        source = (rank - step) % n
        if step == 1:
            work.wait()
        keys, values = (k, v) if step == 0 else parts[source].chunk(2)
        pieces = in_tokens(visible(own, chunks_of(source, n, order), causal), q.shape[1] // len(own))
        attend_backward(gradient, q, keys, values, out, lse, pieces, attention, grad_q, *grads[source].chunk(2))
    of_own, work = start_reduce_scatter(grads, group)
    return grad_q.to(q.dtype), *of_own.to(k.dtype).chunk(2)


# %% 07.13 fake: all-gathers q, k and v, and keeps its own tokens
from course_lib.context_parallel.attention import AllToAll


def ulysses_attention(q, k, v, group=None, causal=True, attention=FUSED_BLOCK, order="zigzag"):
    group = group or dist.group.WORLD
    q, k, v = checked(q, k, v, order)
    check_heads(q.shape[2], k.shape[2], group.size())
    n = group.size()
    k, v = (x.repeat_interleave(max(1, n // x.shape[2]), 2) for x in (k, v))
    whole = (from_order(gather_sequence(x, group), n, order) for x in (q, k, v))
    out = BlockAttention.apply(*whole, attention, causal)
    return by_rank(to_order(out, n, order), n)[group.rank()]


# %% 07.13 fake: all-gathers, attends with its own heads, and scatters sums of heads that are padded with zeros
from course_lib.context_parallel.attention import AllToAll
from course_lib.sequence_parallel.model import gather_sequence as g, reduce_scatter_sequence as leave


def ulysses_attention(q, k, v, group=None, causal=True, attention=FUSED_BLOCK, order="zigzag"):
    group = group or dist.group.WORLD
    q, k, v = checked(q, k, v, order)
    check_heads(q.shape[2], k.shape[2], group.size())
    n, rank = group.size(), group.rank()
    k, v = (x.repeat_interleave(max(1, n // x.shape[2]), 2) for x in (k, v))
    own = (from_order(g(x, group), n, order).unflatten(2, (n, -1))[:, :, rank] for x in (q, k, v))
    out = to_order(BlockAttention.apply(*own, attention, causal), n, order)
    spread = torch.nn.functional.pad(out, (0, 0, rank * out.shape[2], (n - 1 - rank) * out.shape[2]))
    return leave(spread, group)


# %% 07.13 backward: the gradient as it is
from course_lib.context_parallel.attention import AllToAll as Right


class AllToAll(Right):
    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def ulysses_attention(q, k, v, group=None, causal=True, attention=FUSED_BLOCK, order="zigzag"):
    group = group or dist.group.WORLD
    q, k, v = checked(q, k, v, order)
    check_heads(q.shape[2], k.shape[2], group.size())
    n = group.size()
    k, v = (x.repeat_interleave(max(1, n // x.shape[2]), 2) for x in (k, v))
    heads = [x.shape[2] // n for x in (q, k, v)]
    packed = torch.cat([x.unflatten(2, (n, -1)) for x in (q, k, v)], 3)
    arrived = AllToAll.apply(packed.movedim(2, 0), group)
    q, k, v = from_order(in_order(arrived), n, order).split(heads, 2)
    out = BlockAttention.apply(q, k, v, attention, causal)
    back = AllToAll.apply(by_rank(to_order(out, n, order), n), group)
    return back.movedim(0, 2).flatten(2, 3)


# %% 07.13 backward: summed over the ranks
from course_lib.context_parallel.attention import AllToAll as Right


class AllToAll(Right):
    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def ulysses_attention(q, k, v, group=None, causal=True, attention=FUSED_BLOCK, order="zigzag"):
    group = group or dist.group.WORLD
    q, k, v = checked(q, k, v, order)
    check_heads(q.shape[2], k.shape[2], group.size())
    n = group.size()
    k, v = (x.repeat_interleave(max(1, n // x.shape[2]), 2) for x in (k, v))
    heads = [x.shape[2] // n for x in (q, k, v)]
    packed = torch.cat([x.unflatten(2, (n, -1)) for x in (q, k, v)], 3)
    arrived = AllToAll.apply(packed.movedim(2, 0), group)
    q, k, v = from_order(in_order(arrived), n, order).split(heads, 2)
    out = BlockAttention.apply(q, k, v, attention, causal)
    back = AllToAll.apply(by_rank(to_order(out, n, order), n), group)
    return back.movedim(0, 2).flatten(2, 3)


# %% 07.13 an all-to-all for each of q, k, v
from course_lib.context_parallel.attention import AllToAll


def ulysses_attention(q, k, v, group=None, causal=True, attention=FUSED_BLOCK, order="zigzag"):
    group = group or dist.group.WORLD
    q, k, v = checked(q, k, v, order)
    check_heads(q.shape[2], k.shape[2], group.size())
    n = group.size()
    k, v = (x.repeat_interleave(max(1, n // x.shape[2]), 2) for x in (k, v))
    heads = [x.shape[2] // n for x in (q, k, v)]
    traded = [AllToAll.apply(x.unflatten(2, (n, -1)).movedim(2, 0), group) for x in (q, k, v)]
    q, k, v = (from_order(in_order(x), n, order) for x in traded)
    out = BlockAttention.apply(q, k, v, attention, causal)
    back = AllToAll.apply(by_rank(to_order(out, n, order), n), group)
    return back.movedim(0, 2).flatten(2, 3)


# %% 07.13 tokens are not put in order: causal over the zig-zag
from course_lib.context_parallel.attention import AllToAll


def ulysses_attention(q, k, v, group=None, causal=True, attention=FUSED_BLOCK, order="zigzag"):
    group = group or dist.group.WORLD
    q, k, v = checked(q, k, v, order)
    check_heads(q.shape[2], k.shape[2], group.size())
    n = group.size()
    k, v = (x.repeat_interleave(max(1, n // x.shape[2]), 2) for x in (k, v))
    heads = [x.shape[2] // n for x in (q, k, v)]
    packed = torch.cat([x.unflatten(2, (n, -1)) for x in (q, k, v)], 3)
    arrived = AllToAll.apply(packed.movedim(2, 0), group)
    q, k, v = in_order(arrived).split(heads, 2)
    out = BlockAttention.apply(q, k, v, attention, causal)
    back = AllToAll.apply(by_rank(out, n), group)
    return back.movedim(0, 2).flatten(2, 3)


# %% 07.13 too few K/V heads are repeated in another order
from course_lib.context_parallel.attention import AllToAll


def ulysses_attention(q, k, v, group=None, causal=True, attention=FUSED_BLOCK, order="zigzag"):
    group = group or dist.group.WORLD
    q, k, v = checked(q, k, v, order)
    check_heads(q.shape[2], k.shape[2], group.size())
    n = group.size()
    k, v = (x.repeat(1, 1, max(1, n // x.shape[2]), 1) for x in (k, v))
    heads = [x.shape[2] // n for x in (q, k, v)]
    packed = torch.cat([x.unflatten(2, (n, -1)) for x in (q, k, v)], 3)
    arrived = AllToAll.apply(packed.movedim(2, 0), group)
    q, k, v = from_order(in_order(arrived), n, order).split(heads, 2)
    out = BlockAttention.apply(q, k, v, attention, causal)
    back = AllToAll.apply(by_rank(to_order(out, n, order), n), group)
    return back.movedim(0, 2).flatten(2, 3)


# %% 07.13 a K/V head for each head of q, always
from course_lib.context_parallel.attention import AllToAll


def ulysses_attention(q, k, v, group=None, causal=True, attention=FUSED_BLOCK, order="zigzag"):
    group = group or dist.group.WORLD
    q, k, v = checked(q, k, v, order)
    check_heads(q.shape[2], k.shape[2], group.size())
    n = group.size()
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    heads = [x.shape[2] // n for x in (q, k, v)]
    packed = torch.cat([x.unflatten(2, (n, -1)) for x in (q, k, v)], 3)
    arrived = AllToAll.apply(packed.movedim(2, 0), group)
    q, k, v = from_order(in_order(arrived), n, order).split(heads, 2)
    out = BlockAttention.apply(q, k, v, attention, causal)
    back = AllToAll.apply(by_rank(to_order(out, n, order), n), group)
    return back.movedim(0, 2).flatten(2, 3)


# %% 07.13 out comes back with heads and tokens mixed up
from course_lib.context_parallel.attention import AllToAll


def ulysses_attention(q, k, v, group=None, causal=True, attention=FUSED_BLOCK, order="zigzag"):
    group = group or dist.group.WORLD
    q, k, v = checked(q, k, v, order)
    check_heads(q.shape[2], k.shape[2], group.size())
    n = group.size()
    k, v = (x.repeat_interleave(max(1, n // x.shape[2]), 2) for x in (k, v))
    heads = [x.shape[2] // n for x in (q, k, v)]
    packed = torch.cat([x.unflatten(2, (n, -1)) for x in (q, k, v)], 3)
    arrived = AllToAll.apply(packed.movedim(2, 0), group)
    q, k, v = from_order(in_order(arrived), n, order).split(heads, 2)
    out = BlockAttention.apply(q, k, v, attention, causal)
    back = AllToAll.apply(by_rank(to_order(out, n, order), n), group)
    return back.flatten(0, 1).view(q.shape[0], -1, n * heads[0], q.shape[3])


# %% 07.13 each rank attends to its own tokens alone
from course_lib.context_parallel.attention import AllToAll


def ulysses_attention(q, k, v, group=None, causal=True, attention=FUSED_BLOCK, order="zigzag"):
    group = group or dist.group.WORLD
    q, k, v = checked(q, k, v, order)
    check_heads(q.shape[2], k.shape[2], group.size())
    return BlockAttention.apply(q, k, v, attention, causal)


# %% 07.13 attention is dropped
from course_lib.context_parallel.attention import AllToAll


def ulysses_attention(q, k, v, group=None, causal=True, attention=FUSED_BLOCK, order="zigzag"):
    group = group or dist.group.WORLD
    q, k, v = checked(q, k, v, order)
    check_heads(q.shape[2], k.shape[2], group.size())
    n = group.size()
    k, v = (x.repeat_interleave(max(1, n // x.shape[2]), 2) for x in (k, v))
    heads = [x.shape[2] // n for x in (q, k, v)]
    packed = torch.cat([x.unflatten(2, (n, -1)) for x in (q, k, v)], 3)
    arrived = AllToAll.apply(packed.movedim(2, 0), group)
    q, k, v = from_order(in_order(arrived), n, order).split(heads, 2)
    out = BlockAttention.apply(q, k, v, FUSED_BLOCK, causal)
    back = AllToAll.apply(by_rank(to_order(out, n, order), n), group)
    return back.movedim(0, 2).flatten(2, 3)


# %% 07.14 n messages instead of n - 1
megabytes_sent = {"ring": None, "all_gather": None, "ulysses": None}
keys_and_values = 2 * 131072 // 8 * 8 * 128 * 2 / 1e6
megabytes_sent = {"ring": 8 * keys_and_values, "all_gather": 8 * keys_and_values}
megabytes_sent["ulysses"] = 7 / 8 * 131072 // 8 * (2 * 32 + 2 * 8) * 128 * 2 / 1e6


# %% 07.14 keys without values
megabytes_sent = {"ring": None, "all_gather": None, "ulysses": None}
keys_and_values = 131072 // 8 * 8 * 128 * 2 / 1e6
megabytes_sent = {"ring": 7 * keys_and_values, "all_gather": 7 * keys_and_values}
megabytes_sent["ulysses"] = 7 / 8 * 131072 // 8 * (2 * 32 + 2 * 8) * 128 * 2 / 1e6


# %% 07.14 all heads instead of the K/V heads
megabytes_sent = {"ring": None, "all_gather": None, "ulysses": None}
keys_and_values = 2 * 131072 // 8 * 32 * 128 * 2 / 1e6
megabytes_sent = {"ring": 7 * keys_and_values, "all_gather": 7 * keys_and_values}
megabytes_sent["ulysses"] = 7 / 8 * 131072 // 8 * (2 * 32 + 2 * 8) * 128 * 2 / 1e6


# %% 07.14 ulysses without out
megabytes_sent = {"ring": None, "all_gather": None, "ulysses": None}
keys_and_values = 2 * 131072 // 8 * 8 * 128 * 2 / 1e6
megabytes_sent = {"ring": 7 * keys_and_values, "all_gather": 7 * keys_and_values}
megabytes_sent["ulysses"] = 7 / 8 * 131072 // 8 * (32 + 2 * 8) * 128 * 2 / 1e6


# %% 07.14 ulysses: all of a rank's own
megabytes_sent = {"ring": None, "all_gather": None, "ulysses": None}
keys_and_values = 2 * 131072 // 8 * 8 * 128 * 2 / 1e6
megabytes_sent = {"ring": 7 * keys_and_values, "all_gather": 7 * keys_and_values}
megabytes_sent["ulysses"] = 131072 // 8 * (2 * 32 + 2 * 8) * 128 * 2 / 1e6


# %% 07.14 ulysses: the whole sequence
megabytes_sent = {"ring": None, "all_gather": None, "ulysses": None}
keys_and_values = 2 * 131072 // 8 * 8 * 128 * 2 / 1e6
megabytes_sent = {"ring": 7 * keys_and_values, "all_gather": 7 * keys_and_values}
megabytes_sent["ulysses"] = 7 / 8 * 131072 * (2 * 32 + 2 * 8) * 128 * 2 / 1e6


# %% 07.14 in MiB
megabytes_sent = {"ring": None, "all_gather": None, "ulysses": None}
keys_and_values = 2 * 131072 // 8 * 8 * 128 * 2 / 2**20
megabytes_sent = {"ring": 7 * keys_and_values, "all_gather": 7 * keys_and_values}
megabytes_sent["ulysses"] = 7 / 8 * 131072 // 8 * (2 * 32 + 2 * 8) * 128 * 2 / 2**20


# %% 07.14 numbers instead of bytes
megabytes_sent = {"ring": None, "all_gather": None, "ulysses": None}
keys_and_values = 2 * 131072 // 8 * 8 * 128 / 1e6
megabytes_sent = {"ring": 7 * keys_and_values, "all_gather": 7 * keys_and_values}
megabytes_sent["ulysses"] = 7 / 8 * 131072 // 8 * (2 * 32 + 2 * 8) * 128 / 1e6


# %% 07.15 positions are not those of the zig-zag
def fill_positions(model, args, kwargs, group, order):
    need_positions(model, args, kwargs)
    if len(args) > 1 or kwargs.get("positions") is not None:
        return args, kwargs
    return args, kwargs | {"positions": own_positions(args[0].shape[1], group, "contiguous", args[0].device)}


def apply_context_parallel(model, group=None, method="ring", order="zigzag", attention=FUSED_BLOCK):
    group = group or dist.group.WORLD
    check_context_parallel(model, group, method, order)
    for block in model.blocks:
        block.attention.core = functools.partial(METHODS[method], group=group, attention=attention, order=order)
    fill = functools.partial(fill_positions, group=group, order=order)
    model.register_forward_pre_hook(fill, with_kwargs=True)
    return model


# %% 07.15 positions from 0 on every rank
def fill_positions(model, args, kwargs, group, order):
    need_positions(model, args, kwargs)
    if len(args) > 1 or kwargs.get("positions") is not None:
        return args, kwargs
    return args, kwargs | {"positions": torch.arange(args[0].shape[1], device=args[0].device)}


def apply_context_parallel(model, group=None, method="ring", order="zigzag", attention=FUSED_BLOCK):
    group = group or dist.group.WORLD
    check_context_parallel(model, group, method, order)
    for block in model.blocks:
        block.attention.core = functools.partial(METHODS[method], group=group, attention=attention, order=order)
    fill = functools.partial(fill_positions, group=group, order=order)
    model.register_forward_pre_hook(fill, with_kwargs=True)
    return model


# %% 07.15 positions that the caller gives by name are overridden
def fill_positions(model, args, kwargs, group, order):
    need_positions(model, args, kwargs)
    if len(args) > 1:
        return args, kwargs
    return args, kwargs | {"positions": own_positions(args[0].shape[1], group, order, args[0].device)}


def apply_context_parallel(model, group=None, method="ring", order="zigzag", attention=FUSED_BLOCK):
    group = group or dist.group.WORLD
    check_context_parallel(model, group, method, order)
    for block in model.blocks:
        block.attention.core = functools.partial(METHODS[method], group=group, attention=attention, order=order)
    fill = functools.partial(fill_positions, group=group, order=order)
    model.register_forward_pre_hook(fill, with_kwargs=True)
    return model


# %% 07.15 positions that the caller gives are overridden
def fill_positions(model, args, kwargs, group, order):
    need_positions(model, args, kwargs)
    return args[:1], kwargs | {"positions": own_positions(args[0].shape[1], group, order, args[0].device)}


def apply_context_parallel(model, group=None, method="ring", order="zigzag", attention=FUSED_BLOCK):
    group = group or dist.group.WORLD
    check_context_parallel(model, group, method, order)
    for block in model.blocks:
        block.attention.core = functools.partial(METHODS[method], group=group, attention=attention, order=order)
    fill = functools.partial(fill_positions, group=group, order=order)
    model.register_forward_pre_hook(fill, with_kwargs=True)
    return model


# %% 07.15 contiguous posing as zig-zag
def fill_positions(model, args, kwargs, group, order):
    need_positions(model, args, kwargs)
    if len(args) > 1 or kwargs.get("positions") is not None:
        return args, kwargs
    return args, kwargs | {"positions": own_positions(args[0].shape[1], group, order, args[0].device)}


def apply_context_parallel(model, group=None, method="ring", order="zigzag", attention=FUSED_BLOCK):
    group = group or dist.group.WORLD
    check_context_parallel(model, group, method, order)
    for block in model.blocks:
        block.attention.core = functools.partial(METHODS[method], group=group, attention=attention, order="contiguous")
    fill = functools.partial(fill_positions, group=group, order=order)
    model.register_forward_pre_hook(fill, with_kwargs=True)
    return model


# %% 07.15 order is dropped
def fill_positions(model, args, kwargs, group, order):
    need_positions(model, args, kwargs)
    if len(args) > 1 or kwargs.get("positions") is not None:
        return args, kwargs
    return args, kwargs | {"positions": own_positions(args[0].shape[1], group, order, args[0].device)}


def apply_context_parallel(model, group=None, method="ring", order="zigzag", attention=FUSED_BLOCK):
    group = group or dist.group.WORLD
    check_context_parallel(model, group, method, order)
    for block in model.blocks:
        block.attention.core = functools.partial(METHODS[method], group=group, attention=attention)
    fill = functools.partial(fill_positions, group=group, order=order)
    model.register_forward_pre_hook(fill, with_kwargs=True)
    return model


# %% 07.15 attention is dropped
def fill_positions(model, args, kwargs, group, order):
    need_positions(model, args, kwargs)
    if len(args) > 1 or kwargs.get("positions") is not None:
        return args, kwargs
    return args, kwargs | {"positions": own_positions(args[0].shape[1], group, order, args[0].device)}


def apply_context_parallel(model, group=None, method="ring", order="zigzag", attention=FUSED_BLOCK):
    group = group or dist.group.WORLD
    check_context_parallel(model, group, method, order)
    for block in model.blocks:
        block.attention.core = functools.partial(METHODS[method], group=group, order=order)
    fill = functools.partial(fill_positions, group=group, order=order)
    model.register_forward_pre_hook(fill, with_kwargs=True)
    return model


# %% 07.15 method is dropped: always a ring
def fill_positions(model, args, kwargs, group, order):
    need_positions(model, args, kwargs)
    if len(args) > 1 or kwargs.get("positions") is not None:
        return args, kwargs
    return args, kwargs | {"positions": own_positions(args[0].shape[1], group, order, args[0].device)}


def apply_context_parallel(model, group=None, method="ring", order="zigzag", attention=FUSED_BLOCK):
    group = group or dist.group.WORLD
    check_context_parallel(model, group, method, order)
    for block in model.blocks:
        block.attention.core = functools.partial(METHODS["ring"], group=group, attention=attention, order=order)
    fill = functools.partial(fill_positions, group=group, order=order)
    model.register_forward_pre_hook(fill, with_kwargs=True)
    return model


# %% 07.15 only the positions: each rank attends to its own tokens
def fill_positions(model, args, kwargs, group, order):
    need_positions(model, args, kwargs)
    if len(args) > 1 or kwargs.get("positions") is not None:
        return args, kwargs
    return args, kwargs | {"positions": own_positions(args[0].shape[1], group, order, args[0].device)}


def apply_context_parallel(model, group=None, method="ring", order="zigzag", attention=FUSED_BLOCK):
    group = group or dist.group.WORLD
    check_context_parallel(model, group, method, order)
    fill = functools.partial(fill_positions, group=group, order=order)
    model.register_forward_pre_hook(fill, with_kwargs=True)
    return model


# %% 07.15 rings of all ranks instead of the group
def fill_positions(model, args, kwargs, group, order):
    need_positions(model, args, kwargs)
    if len(args) > 1 or kwargs.get("positions") is not None:
        return args, kwargs
    return args, kwargs | {"positions": own_positions(args[0].shape[1], group, order, args[0].device)}


def apply_context_parallel(model, group=None, method="ring", order="zigzag", attention=FUSED_BLOCK):
    group = group or dist.group.WORLD
    check_context_parallel(model, group, method, order)
    for block in model.blocks:
        block.attention.core = functools.partial(
            METHODS[method], group=dist.group.WORLD, attention=attention, order=order
        )
    fill = functools.partial(fill_positions, group=group, order=order)
    model.register_forward_pre_hook(fill, with_kwargs=True)
    return model


# %% 07.15 hidden states without positions are not refused
def fill_positions(model, args, kwargs, group, order):
    if len(args) > 1 or kwargs.get("positions") is not None:
        return args, kwargs
    return args, kwargs | {"positions": own_positions(args[0].shape[1], group, order, args[0].device)}


def apply_context_parallel(model, group=None, method="ring", order="zigzag", attention=FUSED_BLOCK):
    group = group or dist.group.WORLD
    check_context_parallel(model, group, method, order)
    for block in model.blocks:
        block.attention.core = functools.partial(METHODS[method], group=group, attention=attention, order=order)
    fill = functools.partial(fill_positions, group=group, order=order)
    model.register_forward_pre_hook(fill, with_kwargs=True)
    return model


# %% 07.15 order is used by the ring alone, the others take zigzag
def fill_positions(model: nn.Module, args: tuple, kwargs: dict, group: dist.ProcessGroup, order: str) -> tuple:
    """A forward pre-hook: gives a `Transformer` the positions of this rank's tokens, where the caller has given none.
    Raises ValueError for hidden states without positions.
    """
    need_positions(model, args, kwargs)
    x, positions = given(args, kwargs)
    if positions is None:
        positions = own_positions(x.shape[1], group, order, x.device)
    return (x, positions), {}


def apply_context_parallel(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    method: str = "ring",
    order: str = "zigzag",
    attention: AttentionBlock = FUSED_BLOCK,
) -> nn.Module:
    """Let a `Transformer` work on this rank's part of each sequence, in place; returns the model.

    Inputs and targets: shard_sequence(whole, group, order). method: one of METHODS; attention: what computes a block.
    Average the gradients over all ranks of `group`, as of a data-parallel group: wrap the model in DataParallel or ZeRO
    over the data-parallel and context-parallel ranks together (else they drift; out_of_step finds it). After
    apply_tensor_parallel, where there is any; before apply_recompute, whose mode "selective" would only repeat the
    exchange: no scores are kept here.

    Raises ValueError, and changes nothing, where `check_context_parallel` refuses the model or the settings.
    """
    group = group or dist.group.WORLD
    check_context_parallel(model, group, method, order)
    for block in model.blocks:
        block.attention.core = functools.partial(METHODS[method], group=group, attention=attention, order=order if method == "ring" else "zigzag")
    fill = functools.partial(fill_positions, group=group, order=order)
    model.register_forward_pre_hook(fill, with_kwargs=True)
    return model


# %% 07.16 bandwidth over peak
def exchange_ratio(tokens, heads, kv_heads, bandwidth, peak, element_bytes=2, causal=True):
    ratio = element_bytes * kv_heads / (heads * tokens) * bandwidth / peak
    return ratio if causal else ratio / 2


# %% 07.16 all heads instead of the K/V heads
def exchange_ratio(tokens, heads, kv_heads, bandwidth, peak, element_bytes=2, causal=True):
    ratio = element_bytes * 1 / tokens * peak / bandwidth
    return ratio if causal else ratio / 2


# %% 07.16 the mask is forgotten
def exchange_ratio(tokens, heads, kv_heads, bandwidth, peak, element_bytes=2, causal=True):
    ratio = element_bytes * kv_heads / (heads * tokens) * peak / bandwidth
    return ratio / 2


# %% 07.16 twice as much without a mask
def exchange_ratio(tokens, heads, kv_heads, bandwidth, peak, element_bytes=2, causal=True):
    ratio = element_bytes * kv_heads / (heads * tokens) * peak / bandwidth
    return ratio if causal else ratio * 2


# %% 07.16 two bytes, whatever they are
def exchange_ratio(tokens, heads, kv_heads, bandwidth, peak, element_bytes=2, causal=True):
    ratio = 2 * kv_heads / (heads * tokens) * peak / bandwidth
    return ratio if causal else ratio / 2


# %% 07.16 keys without values
def exchange_ratio(tokens, heads, kv_heads, bandwidth, peak, element_bytes=2, causal=True):
    ratio = element_bytes * kv_heads / 2 / (heads * tokens) * peak / bandwidth
    return ratio if causal else ratio / 2


# %% 07.16 tokens squared
def exchange_ratio(tokens, heads, kv_heads, bandwidth, peak, element_bytes=2, causal=True):
    ratio = element_bytes * kv_heads / (heads * tokens**2) * peak / bandwidth
    return ratio if causal else ratio / 2


# %% 07.16 the inverse: attention over exchange
def exchange_ratio(tokens, heads, kv_heads, bandwidth, peak, element_bytes=2, causal=True):
    ratio = element_bytes * kv_heads / (heads * tokens) * peak / bandwidth
    return 1 / ratio if causal else 2 / ratio
