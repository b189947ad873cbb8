"""Time constants of training programs: fields of `Software`, by the program's name.

A program's communication is known from its code and papers. Its rates are fitted to published runs, and tested on the
sources that a fit left out (course_kit/planning/program_fits.py; the tables of benchmarks/planner.py have their 90%
intervals). The exceptions: the rates of "course, kernels" are measured, the rates of "Llama 3" and "DeepSeek-V3"
assumed, and nanotron's are the defaults of `Software`, fitted to the playbook's runs (`calibration`). A constant that a
row does not name is the course's. The constants depend on each other: a faster matmul and slower other kernels predict
nearly the same.
"""

from __future__ import annotations

from typing import Any

PLAIN: dict[str, Any] = {"order": ("pp", "dp", "cp", "tp"), "split": "layers"}

# Megatron-LM of 2021 to 2023, on A100s: attention in separate kernels that write the scores; the gradients are reduced
# after the last backward, and stages send a share of the hidden states from each tensor-parallel rank (Narayanan et al.
# 2021, section 4.1). 18 bytes per parameter, 6 + 12 / dp with the distributed optimizer (its docs, dist_optimizer.md).
MEGATRON_2021 = PLAIN | {
    "overlap": 0.0, "sharded_overlap": 0.0, "scatters_transfers": True, "matmul_efficiency": 0.731,
    "attention_efficiency": 0.0518, "layer_traffic": 378.0, "head_efficiency": 0.72, "logit_traffic": 103.0,
    "network_efficiency": 0.690,
}  # fmt: skip
# Megatron-Core with Transformer Engine: transfers of interleaved stages and a share of the tensor-parallel
# communication are hidden (overlap_p2p_comm, tp_comm_overlap). Attention is cuDNN's, as measured on an H200
# (benchmarks/results/attention_h200.json).
MEGATRON_CORE = PLAIN | {
    "scatters_transfers": True, "overlaps_transfers": True, "matmul_efficiency": 0.79, "fp8_efficiency": 0.680,
    "attention_efficiency": 0.53, "layer_traffic": 448.0, "head_efficiency": 0.72, "logit_traffic": 98.6,
    "tp_overlap": 0.314, "network_efficiency": 0.95,
}  # fmt: skip

TIME_CONSTANTS: dict[str, dict[str, Any]] = {
    # With the kernels of notebook 12b, a step of bench-1B takes 0.304 s on an H200, and 0.361 s without
    # (benchmarks/results/steps_h200.json). The 56 ms are 53% of the planner's time for the other kernels and for the
    # loss without its matmul, so about half of each is left. This is one measurement of one model.
    "course, kernels": {"layer_traffic": 303.0, "head_efficiency": 0.476},
    "Megatron-LM": MEGATRON_2021,
    "Megatron-Core": MEGATRON_CORE,
    "NeMo": MEGATRON_CORE,
    # Assumed: Megatron-Core's without its overlaps, of which Meta's paper reports none, with FlashAttention-2, and with
    # K and V gathered before attention (section 3.3.2). The first and the last stage have one layer less.
    "Llama 3": MEGATRON_CORE | {
        "tp_overlap": 0.0, "overlaps_transfers": False, "attention_efficiency": 0.35, "split": "ends",
        "gathers_keys": True,
    },
    # DeepSeek's program is not public. Published: the exchange crosses once to each node, and DualPipe hides it behind
    # the kernels of another micro-batch (V3's report 2024, sections 3.2.1 and 3.2.2). Measured on its H800s: with 64
    # ranks DeepEP reaches 51 GB/s, 1/8 of which stays in the node, of 50 GB/s, and in a node 153 GB/s of NVLink's 200
    # (DeepEP, docs/legacy.md). Assumed: Megatron-Core's kernels, and a dispatch in BF16, although theirs is in FP8.
    "DeepSeek-V3": MEGATRON_CORE | {
        "matmul_dtype": "fp8", "hops": 2, "exchange_overlap": 1.0, "network_efficiency": 0.89,
        "nvlink_efficiency": 0.765,
    },
    # PyTorch's context parallelism all-gathers by default (torch.distributed.tensor.experimental, set_rotate_method).
    "torchtitan": PLAIN | {
        "matmul_efficiency": 0.605, "fp8_efficiency": 0.6, "layer_traffic": 677.0, "network_efficiency": 0.678,
        "gathers_keys": True,
    },
    # PyTorch's FSDP, attention with ALiBi. `sharded_overlap` is 1.02 (90%: 0.86 to 1.2). It depends on the network's
    # constants: with these fitted again, on 16 to 512 GPUs 0.5 fits as well, 0.25 does not.
    "llm-foundry": PLAIN | {
        "matmul_efficiency": 0.722, "fp8_efficiency": 0.540, "attention_efficiency": 0.177, "layer_traffic": 294.0,
        "head_efficiency": 0.287, "half_rows": 1867.0, "sharded_overlap": 1.02, "network_efficiency": 0.701,
        "gradient_step_s": 1.30e-3,
    },
    # ZeRO-3 with Megatron-LM's layers: it gathers parameter by parameter, in rings over all ranks, and hides none of
    # it. `gradient_step_s` covers some 3,600 rings: two gathers and a reduce-scatter per parameter.
    "DeepSpeed 2021": MEGATRON_2021 | {
        "longest_ring": 4096, "network_efficiency": 0.238, "gradient_step_s": 15.2e-3,
    },
    # Gradients are sent after the backward with ZeRO stage 1, and the network of its runs (EFA) suffers when pipelines
    # and rings meet: `busy_step_s` and `stall_s` are fitted (`calibration`), and their thresholds were observed.
    "nanotron": PLAIN | {
        "split": "flops", "gathers_again": False, "needs_full_pipeline": True, "sharded_overlap": 0.0,
        "busy_step_s": 349e-6, "stall_s": 0.565,
    },
}  # fmt: skip
