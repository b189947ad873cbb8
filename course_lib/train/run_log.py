"""Destinations of the records of a run's steps: a file of JSON lines, TensorBoard, and Weights & Biases.

    log = RunLog(settings.logging, step, as_toml(settings))     # on rank 0 alone
    log.add(records)                                            # steps in ascending order
    log.evaluation(step, loss)                                  # goes to the line of its step
    log.close()

No step is anywhere twice after a restart: the file loses the steps that will be done again, TensorBoard hides them, and
Weights & Biases, which cannot forget a step, does not get them again. A destination that fails is reported in one line,
and the run continues without it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from course_lib.checkpoint.saved_run import Log, log_file
from course_lib.single_gpu.errors import one_line_message
from course_lib.train.sections import Logging
from course_lib.train.settings import Settings, SettingsError

PACKAGES = {"summary": "matplotlib", "tensorboard": "tensorboard", "wandb": "wandb"}  # by the setting that needs it


class Output(Protocol):
    """A destination of records. Its methods may raise anything."""

    def write(self, values: dict) -> None:
        """Write values of a step: `step`, and others by name. Several calls for one step add up."""

    def flush(self) -> None:
        """Write to the disk what may be in memory."""

    def close(self) -> None:
        """Write the rest."""


class JsonLines:
    """A file with a line for each step."""

    def __init__(self, path: Path, step: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.log, self.begin = Log(path, step), 0
        self.last: dict = {}  # the last line, which begins at the byte `begin`

    def write(self, values: dict) -> None:
        """Write a line, or add to the last one."""
        file = self.log.file
        if file is None:
            return
        if values["step"] == self.last.get("step"):
            values = self.last | values
            file.truncate(self.begin)
            file.seek(self.begin)
        self.last, self.begin = values, file.tell()
        self.log.add(values)

    def flush(self) -> None:
        """Do nothing: a line is written at once."""

    def close(self) -> None:
        """Close the file."""
        if self.log.file is not None:
            self.log.file.close()


def numbers(values: dict) -> dict[str, float]:
    """Return the values that can be plotted against the step."""
    return {name: each for name, each in values.items() if name != "step" and isinstance(each, (int, float))}


class TensorBoard:
    """A folder of TensorBoard. Of an earlier run, or of one that was killed, it shows no step after `step`."""

    def __init__(self, folder: str, step: int, config: str):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(folder, purge_step=step + 1)
        self.writer.add_text("config", textwrap.indent(config, "    "), step)

    def write(self, values: dict) -> None:
        """Write the numbers of a step."""
        for name, value in numbers(values).items():
            self.writer.add_scalar(name, value, values["step"])

    def flush(self) -> None:
        """Write to the disk: a step that is in a checkpoint is not done again."""
        self.writer.flush()

    def close(self) -> None:
        """Close the files."""
        self.writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases. Its id is kept beside the run's checkpoints: with them, it continues."""

    def __init__(self, project: str, step: int, config: str):
        import wandb

        settings = tomllib.loads(config)
        folder = settings.get("checkpoints", {}).get("checkpoints")
        file = Path(folder, "wandb-run-id") if folder else None
        saved = file.read_text().strip() if step and file is not None and file.is_file() else None
        self.run: Any = wandb.init(project=project, config=settings, id=saved, resume="allow" if saved else None)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self.run.id)

    def write(self, values: dict) -> None:
        """Log the numbers of a step, unless the run has them from before a restart."""
        if values["step"] >= self.run.starting_step:
            self.run.log(numbers(values), step=values["step"])

    def flush(self) -> None:
        """Do nothing: another process writes."""

    def close(self) -> None:
        """End the run."""
        self.run.finish()


class RunLog:
    """All destinations in the settings. step: after which the run continues; config: the run's settings as TOML.

    A record has the keys step, loss, norm, lr, batch, tokens (consumed so far), step_s, tokens_per_s (per device), mfu
    or None, peak_memory (bytes, of the fullest rank), fullest_rank and layout.
    """

    def __init__(self, logging: Logging, step: int, config: str):
        self.outputs: dict[str, Output] = {}
        makers: dict[str, Callable[[str], Output]] = {
            "out": lambda path: JsonLines(Path(path), step),
            "tensorboard": lambda folder: TensorBoard(folder, step, config),
            "wandb": lambda project: WeightsAndBiases(project, step, config),
        }
        for name, make in makers.items():
            if target := getattr(logging, name):
                self.attempt(name, lambda: self.outputs.update({name: make(target)}))  # noqa: B023  it runs at once

    def attempt(self, name: str, action: Callable[[], object]) -> None:
        """Do something with a destination. If it raises, report it, and use the destination no more."""
        try:
            action()
        except Exception as error:  # the packages raise anything
            self.outputs.pop(name, None)
            print(f"--{name}: {one_line_message(error)}; nothing more is written to it", flush=True)

    def add(self, records: list[dict]) -> None:
        """Write the records of steps, in ascending order."""

        def write_all(output: Output) -> None:
            for each in records:
                output.write(each)
            output.flush()

        for name, output in [*self.outputs.items()]:
            self.attempt(name, lambda: write_all(output))  # noqa: B023  it runs at once

    def evaluation(self, step: int, loss: float) -> None:
        """Write the loss on held-out text after a step, as eval_loss."""
        self.add([{"step": step, "eval_loss": loss}])

    def close(self) -> None:
        """Write the rest, and close all destinations."""
        for name, output in [*self.outputs.items()]:
            self.attempt(name, output.close)
        self.outputs = {}


def has_package(name: str) -> bool:
    """Return whether a package is installed; a folder of its name, such as ./wandb with the data of runs, is none."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def check_folder(name: str, folder: Path) -> None:
    """Raise SettingsError unless a folder can be written to, or made. name: of the setting."""
    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not existing.is_dir():
        raise SettingsError(f"{name} is {folder}, and {existing} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise SettingsError(f"{name} is {folder}: {existing} cannot be written to")


def check_logging(settings: Settings) -> None:
    """Raise SettingsError, in one line, if a file or folder of the log cannot be written, or a package is missing.
    Creates nothing.
    """
    logging = settings.logging
    for name, package in PACKAGES.items():
        if getattr(logging, name) and not has_package(package):
            raise SettingsError(f"{name} needs the package {package}: pip install {package}")
    for name in ("summary", "tensorboard"):
        if target := getattr(logging, name):
            check_folder(name, Path(target))
    if logging.out:
        out = Path(logging.out)
        check_folder("out", out.parent)
        try:
            if out.parent.is_dir():
                log_file(logging.out)
        except argparse.ArgumentTypeError as error:
            raise SettingsError(f"out: {error}") from None
        if out.exists() and not os.access(out, os.W_OK):
            raise SettingsError(f"out: {out} cannot be written to")
