"""The model and the layout that a run's settings name, checked before anything is built."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from course_lib.checkpoint.hf_files import from_hf_config, read_hf_config
from course_lib.expert_parallel.sizes import moe_options
from course_lib.five_d.layouts import Layout, check_layout, fitted
from course_lib.five_d.plan import batch_at
from course_lib.single_gpu.config import PRESETS, ModelConfig
from course_lib.train.sections import Settings
from course_lib.train.settings import SettingsError
from course_lib.train.transforms import check_transforms

SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn_hidden")


@dataclasses.dataclass(frozen=True)
class NamedModel:
    """The sizes of a run's model. name: for messages; moe: arguments of apply_moe, None without experts; vocab_fits:
    whether the vocabulary becomes the tokenizer's.
    """

    name: str
    config: ModelConfig
    moe: dict | None
    vocab_fits: bool

    def with_vocab(self, vocab: int) -> NamedModel:
        """Return the model for a text with this vocabulary. Raises ValueError if the model's is smaller."""
        if self.vocab_fits:
            return dataclasses.replace(self, config=dataclasses.replace(self.config, vocab=vocab))
        if vocab > self.config.vocab:
            raise ValueError(
                f"the text has a vocabulary of {vocab:,}, and the model of {self.name} one of {self.config.vocab:,}"
            )
        return self


def named_model(settings: Settings) -> NamedModel:
    """Return the model of the settings. Raises ValueError, in one line; ImportError without transformers if a
    config.json needs it.
    """
    model, moe = settings.model, None
    source = model.hf_config or model.from_hf
    if source is None:
        name = model.preset or "small"
        sizes = {each: value for each in SIZES if (value := getattr(model, each)) is not None}
        config = dataclasses.replace(PRESETS[name], **sizes)
        name += "".join(f", {each} {value}" for each, value in sizes.items())
    else:
        name = source
        config, moe = read_hf_config(Path(source)) if model.hf_config else from_hf_config(Path(source))
    if model.from_hf and not moe and model.experts is not None:
        raise SettingsError(f"experts is {model.experts}, and the model of from_hf {source} has none")
    moe = moe_options(argparse.Namespace(**vars(model)), moe)
    return NamedModel(name, config, moe and moe | {"aux_loss_coeff": model.aux_loss_coeff}, source is None)


def named_layout(settings: Settings, ranks: int | None = None) -> Layout | None:
    """Return the layout of the settings on so many ranks, or as it is written; None for auto. Raises ValueError for an
    unknown token, and for ranks that an elastic layout does not fit.
    """
    text = settings.layout.layout
    if text == "auto":
        return None
    layout = Layout.parse(text) if text else Layout(dp=ranks or 1, zero_stage=1 if (ranks or 1) > 1 else 0)
    if settings.layout.elastic and ranks is not None:
        layout = fitted(layout, ranks)
    recompute = settings.recomputation.recompute
    return layout if recompute is None else dataclasses.replace(layout, recompute=recompute)


def check_run(settings: Settings, model: NamedModel, layout: Layout, ranks: int | None = None) -> None:
    """Raise ValueError if the layout does not fit the model, the other settings, the ranks, or any batch of the run.
    Without ranks, an elastic layout has no dp yet, which must divide the batches.
    """
    run = settings.run
    ramp = (run.start_batch or run.batch, run.batch, run.ramp)
    batches: list[int | None] = [*sorted({batch_at(step, *ramp) for step in range(1, run.ramp + 2)})]
    for batch in [None] if settings.layout.elastic and ranks is None else batches:
        check_layout(model.config, layout, ranks, batch, run.seq, model.moe)
    check_transforms(settings, layout)
