"""Text from a trained model, one token at a time: a cache of keys and values, and sampling from the nucleus.

Attention of a new token reads the keys and values of all tokens before it. They never change, so each layer keeps them:
2 kv d elements per token and layer. With the cache, a token costs one forward pass of one token; without it, one of all
tokens so far.

From the logits z come probabilities softmax(z / temperature): below 1 a temperature favors the likely tokens, and 0
takes the likeliest. The long tail of unlikely tokens has much probability together, and derails the text: sampling is
restricted to the nucleus, the fewest tokens with a probability of top_p together (Holtzman et al. 2020, The Curious
Case of Neural Text Degeneration, §3.1).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from course_lib.single_gpu.data import seeded
from course_lib.single_gpu.model import Transformer, need_transformer


class CachedAttention:
    """An `Attention.core` that keeps k and v of all calls. length: of the cache, in tokens.

    The first call takes all tokens of the prompt, each later one a single token, which sees all tokens before it.
    """

    def __init__(self, length: int):
        self.length, self.filled = length, 0
        self.keys = self.values = torch.empty(0)  # [b, length, kv, d]

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *documents: torch.Tensor) -> torch.Tensor:
        """Return the attention of the new tokens. q: [b, s, a, d]; k, v: [b, s, kv, d]; returns [b, s, a, d].

        documents: ignored; all tokens belong to one.
        """
        if self.filled == 0:
            self.keys, self.values = (x.new_empty(len(x), self.length, *x.shape[2:]) for x in (k, v))
        begin, self.filled = self.filled, self.filled + k.shape[1]
        self.keys[:, begin : self.filled], self.values[:, begin : self.filled] = k, v
        q, k, v = (x.transpose(1, 2) for x in (q, self.keys[:, : self.filled], self.values[:, : self.filled]))
        causal, grouped = q.shape[2] > 1, q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2)


@contextlib.contextmanager
def generating(model: Transformer, length: int) -> Iterator[None]:
    """Inside, each layer caches keys and values of up to `length` tokens, and the model has no dropout."""
    attentions, training = [block.attention for block in model.blocks], model.training
    cores = [attention.core for attention in attentions]
    model.eval()
    try:
        for attention in attentions:
            attention.core = CachedAttention(length)
        yield
    finally:
        for attention, core in zip(attentions, cores, strict=True):
            attention.core = core
        model.train(training)


def nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return the probabilities [v] of the fewest tokens that have `top_p` or more together, divided by their sum; 0 for
    the other tokens.
    """
    ordered, tokens = probabilities.sort(descending=True, stable=True)
    selected = ordered.cumsum(0) - ordered < top_p  # tokens before which top_p is not reached
    selected[0] = True
    result = torch.zeros_like(probabilities).scatter(0, tokens[selected], ordered[selected])
    return result / result.sum()


def next_token(logits: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Return a token drawn from logits [v] on the host. Raises ValueError if they are not finite."""
    if not logits.isfinite().all():
        raise ValueError("the model's logits are not finite: its weights are broken")
    if temperature == 0:
        return int(logits.argmax())
    logits = logits.double()
    probabilities = ((logits - logits.max()) / temperature).softmax(0)
    return int(torch.multinomial(nucleus(probabilities, top_p), 1, generator=generator))


def check_sampling(tokens: list[int], vocab: int, count: int, temperature: float, top_p: float) -> None:
    """Raise ValueError for arguments that generate_tokens cannot use."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; it must be 0 or more")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must be above 0, and 1 at most")
    if count < 0:
        raise ValueError(f"{count} tokens to generate; it must be 0 or more")
    if not tokens:
        raise ValueError("there is no token to begin with")
    if foreign := [token for token in tokens if not 0 <= token < vocab]:
        raise ValueError(f"token {foreign[0]} is not in the model's vocabulary of {vocab:,}")


@torch.no_grad()
def generate_tokens(
    model: Transformer,
    tokens: list[int],
    count: int,
    temperature: float = 0.8,
    top_p: float = 0.95,
    end_token: int | None = None,
    seed: int = 0,
) -> list[int]:
    """Return up to `count` tokens that the model continues `tokens` with, on one process. The last one is end_token if
    the text ends there.

    The same seed gives the same tokens; temperature 0 takes the likeliest ones, whatever the seed. Raises ValueError if
    an argument cannot be used, TypeError if the model is not a `Transformer`.
    """
    need_transformer(model, "generate_tokens", "transformers' generate continues its own models")
    check_sampling(tokens, model.config.vocab, count, temperature, top_p)
    device, generator, new = next(model.parameters()).device, seeded(seed), list[int]()
    with generating(model, len(tokens) + count):
        while len(new) < count and new[-1:] != [end_token]:
            inputs = new[-1:] or tokens
            begin = len(tokens) + len(new) - len(inputs)
            positions = torch.arange(begin, begin + len(inputs), device=device)
            logits = model(torch.tensor([inputs], device=device), positions)[0, -1]
            new.append(next_token(logits.float().cpu(), temperature, top_p, generator))
    return new
