"""Changes that a run's settings make to its model: kernels, attention, FP8, compilation, weight decay.

`transforms` returns the functions that `parallelize` applies to the split model on the meta device; `compile_blocks`
comes after it. `check_transforms` refuses what does not combine, before a process group exists.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.model import Transformer
from course_lib.single_gpu.placement import placement_of
from course_lib.train.sections import Settings
from course_lib.train.settings import SettingsError

Transform = Callable[[Transformer], object]


def check_transforms(settings: Settings, layout: Layout) -> None:
    """Raise SettingsError, in one line, for settings that do not work in this layout."""
    fp8 = settings.precision.fp8 != "none"
    if settings.data.document_masks and layout.cp > 1:
        raise SettingsError(
            f"document_masks with cp {layout.cp}: ranks would share a document: make cp 1, or document_masks false"
        )
    if fp8 and layout.sequence_parallel:
        raise SettingsError(f"fp8 {settings.precision.fp8} with sp: 8-bit layers take full sequences: leave out sp")
    if settings.precision.fp8_gather and layout.zero_stage != 3:
        raise SettingsError(f"fp8_gather with zero_stage {layout.zero_stage}: only zero3 gathers weights in a step")
    if settings.compile.compile and settings.precision.fp8 == "deepseek-v3" and not torch.cuda.is_available():
        raise SettingsError("compile with fp8 deepseek-v3 on a CPU: inductor's code makes NaN of the scales by blocks")
    for name, enabled in (("compile", settings.compile.compile), ("kernels", settings.kernels.kernels)):
        if enabled and layout.pp > 1 and layout.schedule in ("zb-h1", "zb-h2", "zb-v", "dualpipe"):
            raise SettingsError(
                f"{name} with schedule {layout.schedule}: it runs a layer's backward in two halves: make schedule 1f1b"
            )


def use_flash_blocks(model: Transformer) -> None:
    """Compute the attention of a context-parallel model block by block with FlashAttention's kernels, in place."""
    from course_lib.flash_attention.operator import FLASH_BLOCK

    for block in model.blocks:
        attention: Any = block.attention
        attention.core = functools.partial(attention.core, attention=FLASH_BLOCK)


def stop_decay(model: Transformer, patterns: list[str]) -> None:
    """Mark the parameters whose names contain one of the patterns: they get no weight decay. Raises ValueError for a
    pattern that fits no name.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matching = [parameter for name, parameter in named if pattern in name]
        if not matching:
            raise ValueError(f"no_decay: no parameter has {pattern} in its name, such as {named[0][0]}")
        for parameter in matching:
            placement_of(parameter).decays = False


def transforms(settings: Settings, layout: Layout, most_documents: int) -> list[Transform]:
    """Return the transforms of the split model, in order. most_documents: in a sequence, at most."""
    result: list[Transform] = []
    if settings.kernels.kernels:
        from course_lib.kernels.program import use_kernels

        result.append(use_kernels)
    flash = settings.attention.attention == "flash"
    if settings.data.document_masks:
        from course_lib.train.documents import mask_documents

        result.append(functools.partial(mask_documents, most=most_documents, flash=flash))
    elif flash and layout.cp > 1:
        result.append(use_flash_blocks)
    elif flash:
        from course_lib.flash_attention.operator import use_flash_attention

        result.append(use_flash_attention)
    if settings.precision.fp8 != "none":
        from course_lib.fp8.program import RECIPE_OF_OPTION, apply_fp8

        result.append(functools.partial(apply_fp8, recipe=RECIPE_OF_OPTION[settings.precision.fp8]))
    if settings.precision.fp8_gather:
        from course_lib.fp8.gather import Fp8Gather

        def gather_in_8_bits(model: Transformer) -> None:
            vars(model)["encode"] = Fp8Gather()

        result.append(gather_in_8_bits)
    if settings.kernels.chunked_loss:
        from course_lib.train.loss import apply_chunked_loss

        result.append(apply_chunked_loss)
    if settings.optimizer.no_decay:
        result.append(functools.partial(stop_decay, patterns=settings.optimizer.no_decay))
    return result


def compile_blocks(stages: nn.Module, backend: str) -> None:
    """Compile the forward of each block of this rank's stages, in place. Hooks of ZeRO-3 stay outside of it. Raises
    SettingsError for a backend that PyTorch does not have.
    """
    from torch._dynamo.exc import InvalidBackend

    for module in list(stages.modules()):
        if isinstance(module, Transformer):
            for block in module.blocks:
                try:
                    block.forward = torch.compile(block.forward, backend=backend)  # type: ignore[method-assign]
                except InvalidBackend:
                    known = ", ".join(torch.compiler.list_backends())
                    raise SettingsError(f"backend is {backend}; torch.compile has {known}") from None
