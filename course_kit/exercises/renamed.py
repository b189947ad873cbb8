"""Read a learner's cell that was written for the previous version of the course: with today's names.

The cell keeps its lines and its digest, so that an answer that has passed still counts as passed; only what reaches the
library is renamed. Remove an entry one version after its rename.
"""

import functools
import io
import re
import tokenize

DIRECTIVE = re.compile(r"^(#\| export )([\w.]+)(?::(\w+))?(?=\s*(?:\n|$))")

# What directives name; "module function" where a module's functions went different ways.
TARGETS = {
    "checkpoint.boxes": "checkpoint.chunks",
    "expert_parallel.mixture mixture_params": "expert_parallel.sizes",
    "expert_parallel.exchange:Transfer": "expert_parallel.exchange:AsyncAllToAll",
    "fp8.linear:DelayedCaster": "fp8.delayed_scaling:DelayedQuantizer",
    "fp8.linear:Fp8Products": "fp8.linear:Fp8LinearFunction",
    "five_d.kept_gathers:KeptGathers": "five_d.gather_once:GatherOncePerStep",
    "pipeline.copies": "pipeline.tied_weights",
}
# The module whose main a notebook of before starts.
PROGRAMS = {
    "checkpoint.program": "train.program",
    "data_parallel.replicas": "data_parallel.program",
    "expert_parallel.model": "expert_parallel.program",
    "zero.optimizer": "zero.program",
}
# By today's target: the names that its exercises define or use, ".name" after a dot alone. Those of a module count for
# the methods of its classes too.
# fmt: off
NAMES: dict[str, dict[str, str]] = {
    "best_config.recipe": {"keep_gathered": "gather_once", ".keep_gathered": ".gather_once"},
    "best_config.step_memory": {".kept_whole": ".kept_outside_tp"},
    "best_config.step_time": {".keep_gathered": ".gather_once"},
    "checkpoint.chunks": {"Box": "Chunk", "boxes_of_span": "span_chunks"},
    "context_parallel.attention": {
        "by_rank": "split_by_rank", "checked": "check_qkv", "in_order": "join_by_rank",
        "nothing_seen": "initial_out_lse",
    },
    "context_parallel.blocks": {"Piece": "AttentionTile"},
    "context_parallel.model": {
        "given": "forward_inputs", "need_positions": "require_positions", "own_positions": "local_positions",
    },
    "data_parallel.replicas": {"out_of_step": "find_diverged_params"},
    "expert_parallel.exchange": {
        "Arrival": "WaitAllToAll", "Departure": "StartAllToAll", "Transfer": "AsyncAllToAll",
        "exchanged": "dispatch_and_combine", "finish": "wait", ".finish": ".wait", "home": "reverse",
        "meanwhile": "overlap_with", ".under_way": ".pending",
    },
    "expert_parallel.experts": {"grouped_products": "grouped_matmul"},
    "expert_parallel.mixture": {"run_here": "run_local_experts"},
    "expert_parallel.model": {
        "borders": "tp_boundary", "enter": "input_gather", "exchanged": "dispatch_and_combine",
        "leave": "output_reduce", "meanwhile": "overlap_with", "mixture_blocks": "mixtures_of",
        "run_exchanged": "run_expert_parallel", ".parts": ".sequence_shards",
    },
    "five_d.flight_records": {"Flight": "CollectiveRecord", "lateness": "straggler_delay"},
    "five_d.gather_once:GatherOncePerStep": {
        "KeptGathers": "GatherOncePerStep", "Unit": "FSDPUnit", "before_forward": "pre_forward",
        ".before_forward": ".pre_forward", ".open": ".unreduced", ".parts": ".flat_params",
        ".whole": ".unsharded_params",
    },
    "five_d.layouts": {"keep_gathered": "gather_once", ".keep_gathered": ".gather_once"},
    "five_d.model": {
        "keep_gathered": "gather_once", ".keep_gathered": ".gather_once", "own_positions": "local_positions",
        "own_stages": "local_stages",
    },
    "five_d.node_traffic": {"bytes_across": "inter_node_bytes"},
    "flash_attention.reference": {"rounded_product": "rounded_matmul", "scale_or_usual": "scale_or_default"},
    "fp8.delayed_scaling:DelayedQuantizer": {"DelayedCaster": "DelayedQuantizer"},
    "fp8.kernels": {"piece": "block_k", "scale_a_piece": "scale_a_block", "scale_b_piece": "scale_b_block"},
    "fp8.linear:Fp8LinearFunction": {
        "Fp8Products": "Fp8LinearFunction", "LayerCasters": "LayerQuantizers", ".casters": ".quantizers",
        ".turned": ".transposed",
    },
    "mixed_precision.masters:MasterWeights": {
        "take_gradients": "accumulate_into_master", ".take_gradients": ".accumulate_into_master",
    },
    "pipeline.runner:PipelineRunner": {
        ".copies": ".tied_weights", ".mail": ".p2p", ".put": ".post_send", ".take": ".wait_recv",
    },
    "pipeline.schedules": {"ahead": "warmup_microbatches", "in_turn": "steady_1f1b", "put_off": "delay_weight_grads"},
    "pipeline.search:Greedy": {".ahead": ".max_lead", ".arrival": ".input_ready"},
    "pipeline.split_backward:SplitPass": {
        ".half": ".as_root", ".laters": ".deferred", ".stand_ins": ".proxies", ".to_stand_ins": ".to_proxies",
    },
    "pipeline.tied_weights": {"holders": "owner_ranks"},
    "recompute.modes": {"keep_products": "keep_matmuls"},
    "sequence_parallel.model": {
        "ColumnProducts": "ColumnMatmul", "GatheredProducts": "GatheredMatmul", "by_rank": "split_by_rank",
        "in_order": "join_by_rank", "need_positions": "require_positions", ".leave": ".output_reduce",
        ".products": ".matmul",
    },
    "tensor_parallel.by_hand": {"split_product": "split_matmul"},
    "tensor_parallel.linear": {
        "ColumnProducts": "ColumnMatmul", "RowProduct": "RowMatmul", ".leave": ".output_reduce",
        ".products": ".matmul",
    },
    "tensor_parallel.regions": {"own_randomness": "local_rng"},
    "tensor_parallel.vocabulary": {".leave": ".output_reduce"},
    "zero.by_hand": {".own": ".local_shard"},
    "zero.full_sharding:FullyShard": {
        "Unit": "FSDPUnit", "before_backward": "pre_backward", ".open": ".unreduced", ".parts": ".flat_params",
        ".ran": ".forward_order",
    },
    "zero.optimizer:ZeroOptimizer": {".take": ".set_grad"},
    "zero.shards:GradientBuffer": {".own": ".local_shard"},
    "zero.sharded_parameters:GatheredBuffer": {".own": ".local_shard"},
}
# Attributes that transforms once set on a parameter itself; they are its placement's now.
PLACEMENT = {
    "data_parallel.buckets": "reduce_group",
    "expert_parallel.model": "reduce_group",
    "pipeline.stages": "stages",
    "sequence_parallel.model": "reduce_group",
}
# Lines of given code, and calls, that have changed by more than a name: patterns of lines, for a cell without the word.
LINES = {
    "context_parallel.model": ("applied", {
        r"^    return model$": '    model.applied["context_parallel"] = group_or_world(group); return model',
    }),
    "expert_parallel.model": ("applied", {
        r"\bblocks = mixtures_of\(model\)": "blocks = [each for each in model.blocks if isinstance(each.mlp, MoE)]",
        r"^    check_expert_parallel\(blocks, (.*)\)$": r"    check_expert_parallel(model, \1)",
        r"\bin_sequence_parts\(block\)": '"sequence_parallel" in model.applied',
        r"\btp_boundary\(block, tp_group\)": "tp_boundary(model, tp_group)",
        r"^    return model$":
            '    model.applied["expert_parallel"] = groups[0] if len(groups) == 1 else None; return model',
    }),
    "five_d.model": ("step_hooks", {
        r"PipelineRunner\((\w+), schedule, mesh\.pp, loss_of, mesh\.replicas\)":
            r"PipelineRunner(\1, schedule, mesh.pp, loss_of, mesh.replicas, **step_hooks(\1, layout, dtype, sharding))",
    }),
    "pipeline.runner:PipelineRunner": (", step", {
        r"^def run\((self\b[^,)]*), (action\b[^,)]*)\)": r"def run(\1, \2, step)",
        r"\bself\.finish\(": "self.output_fn(step, ",
        r"\bself\.more\b": "step.args",
        r"\bself\.(passes|inputs|tokens|p2p|autocast|loss)\b": r"step.\1",
    }),
    "sequence_parallel.model": ("applied", {
        r"^    return model$": '    model.applied["sequence_parallel"] = group_or_world(group); return model',
    }),
    "tensor_parallel.model": ("applied", {
        r"functools\.partial\(linear\.project_together, layers=.*\)$": "linear.project_together",
        r"\.project = ": ".project_layers = ",
        r"^    return model$": '    model.applied["tensor_parallel"] = group_or_world(group); return model',
    }),
}
# fmt: on
# Exercises that are not exported, by the name that they define: strings of their answer.
VALUES = {"diagnosis": {"normalised": "normalized"}, "plan": {"products": "matmuls"}}
DEFINED = re.compile(r"^(?:def|class) (\w+)", re.MULTILINE)


@functools.lru_cache(maxsize=256)
def renamed(source: str) -> str:
    """Return the source of a cell with today's names; unchanged if it has no name of the table, or is not Python."""
    directive = DIRECTIVE.match(source)
    try:
        if directive is None:
            return with_strings(source)
        target = directive[2] + (f":{directive[3]}" if directive[3] else "")
        keys = [target, *(f"{target} {name}" for name in DEFINED.findall(source))]
        today = next((TARGETS[key] for key in keys if key in TARGETS), target)
        names = NAMES.get(today.partition(":")[0], {}) | NAMES.get(today, {})
        body = with_names(source[directive.end() :], names)
        body = with_placement(body, PLACEMENT[today]) if today in PLACEMENT else body
        word, lines = LINES.get(today, ("", {}))
        for pattern, line in lines.items() if word not in body else ():
            body = re.sub(pattern, line, body, flags=re.MULTILINE)
        return directive[1] + today + body
    except (SyntaxError, tokenize.TokenError):
        return source


def edited(source: str, edits: list[tuple[int, int, int, str]]) -> str:
    """Return the source after edits (line from 1, first and last column, new text), none of which overlap."""
    lines = source.split("\n")
    for number, start, end, text in sorted(edits, reverse=True):
        line = lines[number - 1]
        lines[number - 1] = line[:start] + text + line[end:]
    return "\n".join(lines)


def with_names(source: str, names: dict[str, str]) -> str:
    """Return the source with names replaced, but for a plain name whose new one the source has already."""
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type != tokenize.NL]
    keys = [
        "." * (before is not None and before.string == ".") + token.string
        for before, token in zip([None, *tokens], tokens, strict=False)
    ]
    edits = []
    for token, key in zip(tokens, keys, strict=True):
        new = names.get(key) if token.type == tokenize.NAME else None
        if new is not None and (key.startswith(".") or new not in keys):
            edits.append((token.start[0], token.start[1], token.end[1], new.removeprefix(".")))
    source = edited(source, edits)
    moved = "|".join(re.escape(name) for name in TARGETS if name.replace(".", "").isidentifier())
    return re.sub(rf"\bcourse_lib\.({moved})\b", lambda match: f"course_lib.{TARGETS[match[1]]}", source)


def with_placement(source: str, attribute: str) -> str:
    """Return the source with `placement_of(x).attribute` for `x.attribute` and `getattr(x, "attribute", None)`."""
    value = r"([A-Za-z_](?:[\w.]|\[[^\[\]]*\])*)"
    source = re.sub(rf"""\bgetattr\({value}, ["']{attribute}["'], None\)""", rf"\1.{attribute}", source)
    return re.sub(rf"(?<![\w.)\]])(?!self\.){value}\.{attribute}\b", rf"placement_of(\1).{attribute}", source)


def with_strings(source: str) -> str:
    """Return the source of a cell that is not exported, with today's strings in an answer of VALUES."""
    for name, strings in VALUES.items():
        if re.search(rf"^(?:def )?{name}\b", source, re.MULTILINE):
            for old, new in strings.items():
                source = re.sub(rf"""(["']){old}\1""", rf"\g<1>{new}\1", source)
    return source


def rename_in_kernel(shell) -> None:
    """Have a Jupyter kernel run the cells that it is given with today's names."""

    def transform(lines: list[str]) -> list[str]:
        return renamed("".join(lines)).splitlines(keepends=True)

    if not any(getattr(each, "__module__", "") == __name__ for each in shell.input_transformers_post):
        shell.input_transformers_post.append(transform)
