"""Sizes of models: plain data, without torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a model, and the features in which models of Llama's kind differ. Raises ValueError if heads do not
    divide evenly.
    """

    layers: int  # L
    hidden: int  # h
    heads: int  # a, query heads
    kv_heads: int  # key and value heads; each serves heads / kv_heads query heads
    ffn_hidden: int  # f
    vocab: int  # v
    tied: bool = False  # head and embedding are one matrix
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    dropout: float = 0.0
    head_size: int | None = None  # d; None: hidden / heads
    rope_factor: float = 1.0  # by how much long_rope_angles lengthens the context (Llama 3.1: 8, 3.2: 32)
    rope_trained: int = 8192  # tokens of that context before
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # each head of q and k is normalized (Qwen3)
    context: int | None = field(default=None, compare=False)  # longest sequence; only config.json needs it

    def __post_init__(self):
        uneven = min(self.hidden, self.heads, self.kv_heads) < 1
        uneven = uneven or (self.head_size is None and self.hidden % self.heads)
        if uneven or self.head_dim % 2 or self.heads % self.kv_heads:
            raise ValueError(
                f"hidden {self.hidden}, heads {self.heads}, kv_heads {self.kv_heads}: heads must divide hidden into "
                "even head sizes, and kv_heads must divide heads"
            )

    @property
    def head_dim(self) -> int:
        """d, the size of one head."""
        return self.hidden // self.heads if self.head_size is None else self.head_size

    @property
    def attention_width(self) -> int:
        """a·d, the width of q and of attention's output: `hidden` if head_size is None, twice that in Qwen3-0.6B."""
        return self.heads * self.head_dim


NOT_OF_WEIGHTS = ("dropout", "context")  # fields that may differ from the model whose weights are loaded
PRESETS = {
    "debug": ModelConfig(2, 64, 4, 2, 176, 256, tied=True),
    "small": ModelConfig(6, 256, 8, 4, 704, 256, tied=True),
    "SmolLM-135M": ModelConfig(30, 576, 9, 3, 1536, 49152, tied=True),
    "llama3.2-1B": ModelConfig(
        16, 2048, 32, 8, 8192, 128256, tied=True, rope_theta=500_000.0, rope_factor=32.0, context=131_072
    ),
    "llama3-8B": ModelConfig(32, 4096, 32, 8, 14336, 128256, rope_theta=500_000.0),
    "llama3-70B": ModelConfig(80, 8192, 64, 8, 28672, 128256, rope_theta=500_000.0),
    "llama3-405B": ModelConfig(126, 16384, 128, 8, 53248, 128256, rope_theta=500_000.0),
    # The shapes of the playbook's benchmark runs: as many K/V heads as heads.
    "bench-1B": ModelConfig(16, 2048, 32, 32, 8192, 131072, tied=True),
    "bench-3B": ModelConfig(28, 3072, 32, 32, 8192, 131072, tied=True),
    "bench-8B": ModelConfig(32, 4096, 32, 32, 14336, 131072),
    "bench-80B": ModelConfig(80, 8192, 64, 64, 28672, 131072),
}
