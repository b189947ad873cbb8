"""Settings of a router: plain data, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

SCORE_NAMES = ("softmax", "sigmoid")


@dataclass(frozen=True)
class Routing:
    """Settings of a router. Raises ValueError if the values do not fit together."""

    experts: int  # E
    top_k: int  # k, experts per token
    score: str = "softmax"  # or "sigmoid"
    scale: float = 1.0  # factor on the final gates
    aux_loss_coeff: float = 0.0  # coefficient of the balance loss
    z_loss_coeff: float = 0.0  # coefficient of the z-loss
    capacity: float | None = None  # an expert's limit over its even share of a call's tokens; None: no limit
    nodes: int = 1  # nodes over which the experts are split evenly
    node_limit: int = 1  # M, nodes per token

    def __post_init__(self):
        if self.score not in SCORE_NAMES:
            raise ValueError(f"score {self.score!r}: it is one of {', '.join(SCORE_NAMES)}")
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k {self.top_k}: it must be 1 to {self.experts}, the number of experts")
        if not 1 <= self.node_limit <= self.nodes or self.experts % self.nodes:
            settings = f"nodes {self.nodes}, node_limit {self.node_limit}"
            raise ValueError(f"{settings}: nodes must divide experts ({self.experts}), and node_limit be 1 to nodes")
        if self.top_k > self.node_limit * self.experts // self.nodes:
            raise ValueError(
                f"node_limit {self.node_limit}: on so many nodes are fewer than top_k {self.top_k} experts"
            )
        if self.capacity is not None and not self.capacity > 0:
            raise ValueError(f"capacity {self.capacity}: it must be above 0, or None")

    def slots(self, tokens: int) -> int:
        """Return an expert's capacity: the most tokens of a call that it takes."""
        if self.capacity is None:
            return tokens
        return math.ceil(self.capacity * tokens * self.top_k / self.experts - 1e-9)  # 1.1 x 10 is 11, rounding or not
