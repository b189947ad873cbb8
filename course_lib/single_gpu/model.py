"""A Llama-style transformer that knows nothing of parallelism: RMSNorm, RoPE, grouped-query attention, SwiGLU.

Later notebooks replace parts: `Attention.core` is any function of q [b, s, a, d], k and v [b, s, kv, d] (and of the
documents [b, s], if `document_masks` is set), and `Attention.rope` and `MLP.activation` any functions with the
arguments of `apply_rope` and `swiglu`; `project_layers` of Attention and MLP applies several layers to one x;
`embedding` and `head` may be None (a pipeline stage); `forward` takes tokens [b, s] or hidden states [b, s, h], and
positions. Initial weights depend only on the seed and the parameter's name, so a rank can make any one parameter
without the others.

Touvron et al. 2023 (Llama); Su et al. 2021 (RoPE); Ainslie et al. 2023 (GQA); Shazeer 2020 (SwiGLU); Zhang and Sennrich
2019 (RMSNorm).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib.single_gpu.config import NOT_OF_WEIGHTS as NOT_OF_WEIGHTS
from course_lib.single_gpu.config import PRESETS as PRESETS
from course_lib.single_gpu.config import ModelConfig as ModelConfig


def rope_angles(positions: torch.Tensor, config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos, sin of the angle of each position and pair, float32: [s, d/2] for positions [s], [b, s, d/2] for
    positions [b, s].
    """
    pairs = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None].float() * config.rope_theta ** (-pairs / config.head_dim)
    return angles.cos(), angles.sin()


# exercise 01.2
def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (i, i + d/2) of x: [b, s, a, d] by its angle; returns a new tensor of x's shape and dtype.

    cos, sin: [s, d/2] or [b, s, d/2], in x's dtype. Su et al. 2021, §3.4.
    """
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def long_rope_angles(positions: torch.Tensor, config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rope_angles of a model whose context was lengthened (Llama 3.1, `rope_type: llama3`): pairs that turn
    less than once in `rope_trained` tokens turn `rope_factor` times more slowly, pairs that turn more than 4 times as
    before, the others in between. Llama Team 2024, §3.4.2; the published models have 1 and 4.
    """
    pairs = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
    speeds = config.rope_theta ** (-pairs / config.head_dim)  # radians per token
    unchanged = ((config.rope_trained * speeds / (2 * math.pi) - 1) / 3).clamp(0, 1)  # share of the speed
    angles = positions[..., None].float() * speeds * (unchanged + (1 - unchanged) / config.rope_factor)
    return angles.cos(), angles.sin()


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return softmax(q k^T / sqrt(d), causal) v. q: [b, s, a, d]; k, v: [b, s, kv, d]; returns [b, s, a, d]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, heads, s, d]
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)


class Layer(Protocol):
    """A layer with a weight: nn.Linear, nn.Embedding, or what a transform puts in its place."""

    weight: torch.Tensor

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        """Return the layer's output for x."""


class LinearLayer(Layer, Protocol):
    """A layer with a weight and perhaps a bias: nn.Linear, or what a transform puts in its place."""

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias, None if there is none."""


def project_each(x: torch.Tensor, layers: list[LinearLayer]) -> tuple[torch.Tensor, ...]:
    """Return the output of each layer for one input x. Transforms replace this function by faster ones."""
    return tuple(layer(x) for layer in layers)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; `core` is the attention itself, `rope` turns q and k."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_dim, self.dropout = config.head_dim, config.dropout
        self.rope, self.core = apply_rope, causal_attention
        self.project_layers: Callable[[torch.Tensor, list[Any]], tuple[torch.Tensor, ...]] = project_each
        width, kv_width = config.attention_width, config.kv_heads * config.head_dim
        self.q_proj: LinearLayer = nn.Linear(config.hidden, width, config.qkv_bias)  # [a*d, h]
        self.k_proj: LinearLayer = nn.Linear(config.hidden, kv_width, config.qkv_bias)  # [kv*d, h]
        self.v_proj: LinearLayer = nn.Linear(config.hidden, kv_width, config.qkv_bias)  # [kv*d, h]
        self.o_proj: LinearLayer = nn.Linear(width, config.hidden, bias=False)  # [h, a*d]
        self.q_norm = nn.RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return q [b, s, a*d], k and v [b, s, kv*d] of x [b, s, h]."""
        return self.project_layers(x, [self.q_proj, self.k_proj, self.v_proj])

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *documents: torch.Tensor) -> torch.Tensor:
        """x: [b, s, h]; cos, sin: [s, d/2] or [b, s, d/2]; documents: [b, s], or none; returns [b, s, h]."""
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.project(x))  # [b, s, heads, d]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = self.core(self.rope(q, cos, sin), self.rope(k, cos, sin), v, *documents)  # [b, s, a, d]
        return F.dropout(self.o_proj(out.flatten(-2)), self.dropout, self.training)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, each [b, s, f]. Shazeer 2020."""
    return F.silu(gate) * up


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)); `activation` is the part before `down`."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.dropout, self.activation = config.dropout, swiglu
        self.project_layers: Callable[[torch.Tensor, list[Any]], tuple[torch.Tensor, ...]] = project_each
        self.gate_proj: LinearLayer = nn.Linear(config.hidden, config.ffn_hidden, bias=False)  # [f, h]
        self.up_proj: LinearLayer = nn.Linear(config.hidden, config.ffn_hidden, bias=False)  # [f, h]
        self.down_proj: LinearLayer = nn.Linear(config.ffn_hidden, config.hidden, bias=False)  # [h, f]

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return gate and up, each [b, s, f], of x [b, s, h]."""
        return self.project_layers(x, [self.gate_proj, self.up_proj])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [b, s, h]; returns [b, s, h]."""
        out = self.down_proj(self.activation(*self.project(x)))
        return F.dropout(out, self.dropout, self.training)


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden, config.norm_eps)
        self.mlp: nn.Module = MLP(config)  # or a mixture of experts

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *documents: torch.Tensor) -> torch.Tensor:
        """x: [b, s, h]; returns [b, s, h]."""
        x = x + self.attention(self.attention_norm(x), cos, sin, *documents)
        return x + self.mlp(self.mlp_norm(x))


if TYPE_CHECKING:

    class Blocks(nn.ModuleList):
        """An nn.ModuleList of `Block`, for type checkers."""

        def __iter__(self) -> Iterator[Block]:
            """Iterate over the blocks."""


class Transformer(nn.Module):
    """Tokens [b, s] to logits [b, s, v]; without `embedding` it takes hidden states [b, s, h], without `head` it
    returns them.
    """

    if TYPE_CHECKING:

        @property
        def blocks(self) -> Blocks:
            """The decoder blocks, by number."""

        @blocks.setter
        def blocks(self, blocks: nn.ModuleList) -> None: ...

    active_config: ModelConfig  # sizes of the model that one token passes through; set by apply_moe
    document_masks = False  # whether attention gets the documents: a new one begins at each position 0

    def __init__(self, config: ModelConfig, seed: int = 0):
        super().__init__()
        self.config = config
        self.applied: dict[str, dist.ProcessGroup | None] = {}  # parallel transforms by name, each with its group
        self.embedding: Layer | None = nn.Embedding(config.vocab, config.hidden)  # [v, h]
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm: nn.RMSNorm | None = nn.RMSNorm(config.hidden, config.norm_eps)
        self.head: LinearLayer | None = nn.Linear(config.hidden, config.vocab, bias=False)  # [v, h]
        if config.tied:
            self.head.weight = self.embedding.weight
        if not self.head.weight.is_meta:
            self.init_weights(seed)

    def init_weights(self, seed: int = 0) -> None:
        """Fill every parameter by `init_parameter`."""
        for name, parameter in self.named_parameters():
            init_parameter(name, parameter, self.config, seed)

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None, *targets: torch.Tensor) -> torch.Tensor:
        """x: tokens [b, s] or hidden states [b, s, h]; positions: [s] or [b, s], None: 0 … s-1; targets: for a head
        that takes them, and returns a loss; returns logits or hidden states.
        """
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        if self.embedding is not None:
            x = self.embedding(x)  # [b, s, h]
        angles = rope_angles if self.config.rope_factor == 1 else long_rope_angles
        cos, sin = (part.to(x.dtype) for part in angles(positions, self.config))
        documents = ((positions == 0).cumsum(-1),) if self.document_masks else ()
        for block in self.blocks:
            x = block(x, cos, sin, *documents)
        return x if self.head is None or self.norm is None else self.head(self.norm(x), *targets)


def need_transformer(model: nn.Module, function: str, instead: str) -> None:
    """Raise TypeError unless `model` is a `Transformer`.

    function: the caller's name; instead: what works in any model.
    """
    if isinstance(getattr(model, "module", None), Transformer):
        raise TypeError(f"{function} comes before the model is wrapped in {type(model).__name__}")
    if not isinstance(model, Transformer):
        raise TypeError(f"{function} takes the course's Transformer, not {type(model).__name__}; {instead}")


@torch.no_grad()
def init_parameter(name: str, parameter: torch.Tensor, config: ModelConfig, seed: int = 0) -> None:
    """Fill one full parameter: ones for norms, zeros for other vectors, else normal with deviation 0.02, residual
    outputs scaled by 1/sqrt(2L) (GPT-2, §2.3).

    The values depend only on the seed and the name: a rank can make one parameter without the others.
    """
    name = plain_name(name)
    if parameter.is_meta:  # a shape without numbers
        return
    if parameter.dim() < 2:
        parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        return
    deviation = 0.02 / math.sqrt(2 * config.layers) if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
    generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    parameter.normal_(0.0, deviation, generator=generator)


def plain_name(name: str) -> str:
    """Return a parameter's name in the model as it was before torch.compile wrapped any of its modules."""
    return name.replace("_orig_mod.", "")


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy over all tokens, computed in float32. logits: [b, s, v]; targets: [b, s]; returns a
    scalar.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
