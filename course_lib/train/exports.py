"""The folders of a run's checkpoints and of its exported model, checked before it trains."""

from __future__ import annotations

from pathlib import Path

from course_lib.checkpoint.files import ABOUT
from course_lib.expert_parallel.routing import Routing
from course_lib.single_gpu.config import ModelConfig
from course_lib.train.run_log import check_folder
from course_lib.train.sections import Settings
from course_lib.train.settings import SettingsError


def check_checkpoints(settings: Settings, config: ModelConfig, moe: dict | None) -> None:
    """Raise ValueError, in one line, if the checkpoints or the export cannot be written, or transformers has no such
    model. moe: arguments of apply_moe. Creates nothing. ImportError if an export lacks transformers.
    """
    folders = settings.checkpoints
    if folders.checkpoints:
        folder = Path(folders.checkpoints)
        check_folder("checkpoints", folder)
        if (folder / ABOUT).exists():
            raise SettingsError(
                f"checkpoints is {folder}, which is one checkpoint: name the folder above it; to continue from an "
                "earlier one, copy its folder to a new folder, and name that"
            )
    if not folders.export:
        return
    out = Path(folders.export)
    if out.exists() or out.is_symlink():
        choices = "name a new folder, remove it, or set no export (--export '')"
        raise SettingsError(f"export is {out}, which exists already: {choices}")
    check_folder("export", out.parent)
    check_exportable(config, moe)


def check_exportable(config: ModelConfig, moe: dict | None) -> None:
    """Raise ValueError if transformers has no model with these sizes; ImportError if it is missing."""
    from course_lib.expert_parallel.hugging_face import to_hf_mixture
    from course_lib.single_gpu.hugging_face import to_hf_config

    dense = to_hf_config(config)
    if moe is None:
        return
    if moe.get("shared"):
        raise ValueError("export: no mixture of transformers that the course knows has shared experts: make shared 0")
    routing = {name: value for name, value in moe.items() if name not in ("ffn_hidden", "shared", "seed")}
    to_hf_mixture(dense, Routing(**routing), moe.get("ffn_hidden") or config.ffn_hidden)
