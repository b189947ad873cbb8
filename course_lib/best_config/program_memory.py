"""Memory constants of training programs: fields of `Software`, by the program's name.

A layer keeps these elements of 16 bits per token; h is the hidden size, f the MLP's width:

    tensor                           course, kernels    Megatron-Core    torchtitan    Megatron-LM    llm-foundry
    inputs of the two norms          2 h                2 h              2 h           2 h            2 h
    outputs of the norms             2 h                2 h              2 h           2 h            2 h
    two dropout masks, one byte      -                  -                -             h              -
    q, output of attention           2 h                2 h              2 h           2 h            2 h
    k and v                          2 kv               2 kv             2 h           2 h            2 h
    inputs of SwiGLU or GELU         2 f                2 f              2 f           4 h            4 h
    silu(gate)                       -                  -                f             -              -
    input of the last matrix         f                  f                f             4 h            4 h
    Llama 3 8B, f = 3.5 h            17.0 h             17.0 h           22.0 h
    Llama 3 405B, f = 3.25 h         15.9 h             15.9 h           21.0 h

Flash attention keeps 4 more bytes per token and head, less than 0.02 h. torchtitan repeats K and V for all heads
(repeat_kv); its column is without torch.compile, which does not keep silu(gate). GPT's 8 h are 3 f of an MLP of three
matrices with the same parameters, f = 8/3 h.

Sources: saved tensors, counted (course); save_for_backward of LayerNormLinear, Linear and FusedAttention (Transformer
Engine) and of bias_swiglu (Megatron-Core); torchtitan/models/llama3; llm-foundry's MPTBlock with flash attention;
Korthikanti et al. 2022, section 4, for Megatron-LM: 34 h bytes, 10 h of them outside the matrices, and 5 a s.
"""

from __future__ import annotations

from typing import Any

FUSED = {"kept_outside_tp": 4.0, "kept_hidden": 8.0, "kept_ffn": 3.0}  # the first two columns, and llm-foundry's

# Transformer Engine keeps a layer's weights in FP8, and their transposes, besides the weights in BF16. Logits: BF16,
# and FP32, which becomes the softmax and its gradient in place (vocab_parallel_cross_entropy).
MEGATRON_CORE = FUSED | {"logit_bytes": (6.0, 6.0), "fp8_weight_bytes": 2.0}
# Megatron-LM of 2021 and 2022: FP16, without flash attention; the loss copies the logits in FP32.
MEGATRON_2021 = {
    "kept_outside_tp": 5.0, "kept_hidden": 9.0, "kept_ffn": 3.0, "score_bytes": 5.0, "logit_bytes": (10.0, 10.0),
}  # fmt: skip
# FSDP shards weights in FP32, gradients in FP32 and Adam's two states, and gathers weights in BF16.
FSDP = {"weight_bytes": 4, "gradient_bytes": 4, "optimizer_bytes": 8}

MEMORY_CONSTANTS: dict[str, dict[str, Any]] = {
    "course, kernels": FUSED | {"fused_loss": True},
    "Megatron-LM": MEGATRON_2021,
    "Megatron-Core": MEGATRON_CORE,
    # NVIDIA's recipes for NeMo: Apex's distributed_fused_adam with grad_sync_dtype bf16. It stores only the 16 bits of
    # an FP32 weight that BF16 lacks (store_param_remainders), so states are 4 + 4 + 2 bytes.
    "NeMo": MEGATRON_CORE | {"gradient_bytes": 2, "optimizer_bytes": 10},
    # Meta's program is not public. Assumed: 12.6 h for 405B, with xFormers' SwiGLU, which keeps gate and up and
    # recomputes their product. The unusable memory is fitted to a bound: the paper's runs ran without recomputation,
    # with tensors freed early (section 3.3.2), and the fullest one needs 74.3 GiB by this count.
    "Llama 3": MEGATRON_CORE | {"kept_ffn": 2.0, "unusable_bytes": 4 * 2**30},
    # DeepSeek-V3's report 2024, sections 3.2.3 and 3.3: norms and latent attention's projections are recomputed, so a
    # layer keeps the norms' inputs and attention's output. (`kept_elements` adds 2 widths for K and V, so 1 less than
    # none is 1 in all.) SwiGLU's inputs and each choice's row before its expert are kept in FP8, Adam's states in BF16,
    # the optimizer's weights and the gradients in FP32. Assumed: weights in FP8 and transposed, which is 2 bytes; gates
    # that are applied before an expert's last matrix, so that no row after it is kept; Megatron-Core's loss.
    "DeepSeek-V3": {
        "kept_outside_tp": 2.0, "kept_hidden": 3.0, "kept_ffn": 1.0, "kept_rows": 0.5, "fp8_inputs": False,
        "optimizer_bytes": 8, "logit_bytes": (6.0, 6.0),
    },
    # Selective recomputation keeps a layer's input and the results of attention and of every other matmul (q, v, gate,
    # down): 4 h + kv + f, which is 0.35 of a Llama layer. K and V: 1.5 h besides 2 kv, as in Llama 3 8B. Float8Linear
    # keeps its inputs in BF16. Logits in FP32, their log-softmax, and the gradients of both: 12 bytes at the peak.
    # reserved_bytes is fitted to ten published readings of Llama 3.1 8B (benchmarks/llama3_h100_202412): they are of
    # the allocator's reserved memory, fragments included, so less of the rest is unusable.
    "torchtitan": FSDP | {
        "kept_outside_tp": 4.0, "kept_hidden": 9.5, "kept_ffn": 4.0, "selective_keeps": 0.35, "selective_again": 0.5,
        "fp8_inputs": False, "logit_bytes": (12.0, 12.0), "reserved_bytes": 5 * 2**30, "unusable_bytes": 2**30,
    },
    # Logits in BF16, and their gradient (fused cross-entropy). The unusable memory is fitted to a bound: runs that need
    # 35 GiB by this count ran on GPUs of 40 GB.
    "llm-foundry": FSDP | FUSED | {"logit_bytes": (4.0, 4.0), "unusable_bytes": 4 * 2**30},
    # ZeRO-3 around Megatron-LM's layers, with gradients in FP16. It gathers the matrix in use and at most 10^9 more
    # parameters (stage3_max_live_parameters): about two thirds of a layer of the models that it ran.
    "DeepSpeed 2021": MEGATRON_2021 | {"gradient_bytes": 2, "gathered_layers": 0.67},
    # Gradients in BF16 stay in memory besides their sums in FP32, and gathered hidden states wait for the GPU; the
    # latter is fitted to the playbook's runs (`calibration`).
    "nanotron": {"gradient_bytes": 6, "held": (0.954, 0.717)},
}  # fmt: skip
