"""The models, texts and batches of notebook 14b, and the gradients that its figures quantize."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import nn

from course_kit.typed import grad_of
from course_lib.single_gpu import model as plain_model
from course_lib.single_gpu.data import ByteTokenizer, TokenBatches, corpus
from course_lib.single_gpu.model import ModelConfig, Transformer
from course_lib.single_gpu.training import adamw, train_step

SMALL = ModelConfig(vocab=256, hidden=64, layers=2, heads=4, kv_heads=2, ffn_hidden=192)
MEDIUM = ModelConfig(vocab=256, hidden=128, layers=2, heads=4, kv_heads=2, ffn_hidden=256)
WIDE = dataclasses.replace(SMALL, hidden=128, ffn_hidden=384)  # full squares of 128 on two ranks

Batch = tuple[torch.Tensor, torch.Tensor]


@functools.cache
def tokens(characters: int = 400_000) -> torch.Tensor:
    """Return this many characters of the course's text as tokens."""
    return ByteTokenizer().encode(corpus(characters))


def sentences() -> torch.Tensor:
    """Return the first tokens of the text as four sequences, [4, 33]."""
    return tokens()[: 4 * 33].long().view(4, 33)


def gradients_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return all gradients of one backward as a float32 vector."""
    model.zero_grad()
    plain_model.loss(model(inputs), targets).backward()
    return torch.cat([grad_of(parameter).flatten() for parameter in model.parameters()])


def small_gradients() -> torch.Tensor:
    """Return the nonzero gradients of a small model, scaled as in a batch of 2^20 tokens. (Rows of the embedding
    without a token have gradient 0.)
    """
    inputs, targets = next(TokenBatches(tokens(), batch=16, seq=64))
    gradients = gradients_of(Transformer(SMALL), inputs, targets) * inputs.numel() / 2**20
    return gradients[gradients != 0]


def trained(config: ModelConfig, rate: float, steps: int) -> tuple[Transformer, torch.optim.Optimizer, TokenBatches]:
    """Train with AdamW on batches of 8 x 64 tokens; return the model, its optimizer and the remaining batches."""
    model = Transformer(config)
    optimizer, batches = adamw(model, rate), TokenBatches(tokens(), batch=8, seq=64)
    for _ in range(steps):
        train_step(model, optimizer, *next(batches))
    return model, optimizer, batches


@functools.cache
def trained_model() -> tuple[Transformer, Batch]:
    """Return a model after 60 steps and an unseen batch. Copy the model before you change it."""
    model, _, batches = trained(MEDIUM, 2e-3, 60)
    return model, next(batches)


@functools.cache
def warmed_up_optimizer() -> torch.optim.Optimizer:
    """Return the optimizer of a model after 20 steps in float32, for its moments."""
    return trained(MEDIUM, 1e-3, 20)[1]
