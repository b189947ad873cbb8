"""The settings of a training run: the keys of its TOML file, their defaults, and their meaning.

    settings = read_settings(["run.toml", "--steps", "1000"])
    settings.optimizer.lr; settings.run.steps

Each key belongs to one section of the file, and is also an option of the command line, which takes precedence: `lr` in
[optimizer] is --lr. `as_toml` writes all of them, with their meaning, as --print-config does.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
import sys
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from course_lib.train.sections import Settings


class SettingsError(ValueError):
    """A setting that cannot be used. Its message is one line for the user."""


def keys() -> Iterator[tuple[str, dataclasses.Field]]:
    """Yield the section and the field of each key, in the order of the file."""
    settings = Settings()
    for section in dataclasses.fields(Settings):
        for each in dataclasses.fields(getattr(settings, section.name)):
            yield section.name, each


def type_of(section: str, name: str) -> tuple[type, type | None, bool]:
    """Return the type of a key's value, the type of its elements if it is a list, and whether it may be unset."""
    hints = typing.get_type_hints(type(getattr(Settings(), section)))
    options = [each for each in typing.get_args(hints[name]) if each is not type(None)]
    optional = type(None) in typing.get_args(hints[name])
    hint = options[0] if optional else hints[name]
    if typing.get_origin(hint) is list:
        return list, typing.get_args(hint)[0], optional
    return hint, None, optional


NOUNS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", dict: "a table"}


def checked(section: str, each: dataclasses.Field, value: Any, who: str) -> Any:
    """Return a value of a key, in its type. Raises SettingsError; who: the key's name in the message."""
    kind, element, optional = type_of(section, each.name)
    if value is None and optional:
        return None
    if kind is list:
        if not isinstance(value, list):
            raise SettingsError(f"{who} is {shown(value)}; it must be a list")
        if "" in value:
            raise SettingsError(f"{who} has an empty string in it")
        return [of_type(item, element or str, who) for item in value]
    value, limits = of_type(value, kind, who), each.metadata
    if choices := limits.get("choices"):
        if value not in choices:
            raise SettingsError(f"{who} is {shown(value)}; {did_you_mean(value, choices)}")
    if "least" in limits and value < limits["least"]:
        raise SettingsError(f"{who} is {shown(value)}; it must be {limits['least']} or more")
    if "above" in limits and not value > limits["above"]:
        raise SettingsError(f"{who} is {shown(value)}; it must be above {limits['above']}")
    if "most" in limits and value > limits["most"]:
        raise SettingsError(f"{who} is {shown(value)}; it must be {limits['most']} or less")
    if "below" in limits and not value < limits["below"]:
        raise SettingsError(f"{who} is {shown(value)}; it must be below {limits['below']}")
    if isinstance(value, float) and not math.isfinite(value):
        raise SettingsError(f"{who} is {value}; it must be finite")
    if value == "":
        raise SettingsError(f"{who} is empty")
    return value


def of_type(value: Any, kind: type, who: str) -> Any:
    """Return a TOML value in the type of its key. Raises SettingsError for any other."""
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise SettingsError(f"{who} is too large for a number") from None
    if type(value) is not kind:
        raise SettingsError(f"{who} is {shown(value)}; it must be {NOUNS[kind]}")
    return value


def shown(value: Any) -> str:
    """Return a value as TOML writes it."""
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} = {shown(each)}' for name, each in value.items())}}}"
    if isinstance(value, (bool, str)):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON allows it, TOML does not
    return f"{value}"


def did_you_mean(name: Any, known: list[str]) -> str:
    """Return a hint with the nearest of the known names, or all of them."""
    near = difflib.get_close_matches(str(name), known, 1, 0.6)
    return f"did you mean {near[0]}?" if near else f"it is one of {', '.join(known)}"


def from_toml(file: Path) -> dict[tuple[str, str], Any]:
    """Return the settings of a TOML file by section and key. Raises SettingsError, in one line."""
    try:
        contents = tomllib.loads(file.read_text(encoding="utf-8-sig"))  # Windows' editors write a byte order mark
    except (OSError, ValueError) as error:  # tomllib raises ValueError for a number of very many digits
        raise SettingsError(f"{file}: {getattr(error, 'strerror', None) or error}") from None
    section_of = {each.name: section for section, each in keys()}
    sections = list(dict.fromkeys(section_of.values()))
    values = {}
    for section, table in contents.items():
        if section not in sections:
            if section in section_of and not isinstance(table, dict):
                raise SettingsError(f"{file}: {section} belongs to [{section_of[section]}]")
            raise SettingsError(f"{file}: there is no section [{section}]; {did_you_mean(section, sections)}")
        if not isinstance(table, dict):
            raise SettingsError(f"{file}: {section} is a section: write [{section}], and its keys below")
        of_section = {each.name: each for of, each in keys() if of == section}
        for name, value in table.items():
            if name not in of_section:
                hint = (
                    f"it belongs to [{section_of[name]}]" if name in section_of else did_you_mean(name, [*of_section])
                )
                raise SettingsError(f"{file}: [{section}] has no key {name}; {hint}")
            values[section, name] = checked(section, of_section[name], value, f"{file}: {name} in [{section}]")
    return values


class Parser(argparse.ArgumentParser):
    """A parser whose errors name the nearest option."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            word = unknown.split()[0]
            if word.startswith("-"):
                known = [option for action in self._actions for option in action.option_strings if option != "-h"]
                near = difflib.get_close_matches(word.split("=")[0], known, 1, 0.6)
                hint = f"did you mean {near[0]}?" if near else "--help lists them"
                message = f"there is no option {word}; {hint}"
            else:
                message = f"{word} is one argument too many; the only one is a TOML file"
        raise SettingsError(message)


def from_option(section: str, each: dataclasses.Field, text: str) -> Any:
    """Return the value of a key from the text of its option. Raises SettingsError."""
    (kind, element, optional), who = type_of(section, each.name), option_of(each.name)
    if not text and optional:
        return None

    def one(word: str, kind: type) -> Any:
        try:
            return kind(word)
        except ValueError:
            raise SettingsError(f"{who} is {shown(word)}; it must be {NOUNS[kind]}") from None

    words = text.removeprefix("[").removesuffix("]").split(",") if text else []
    value = [one(word.strip(), element) for word in words] if kind is list and element else one(text, kind)
    return checked(section, each, value, who)


def option_of(name: str) -> str:
    """Return a key's option on the command line."""
    return f"--{name.replace('_', '-')}"


def settings_parser() -> Parser:
    """Return the parser of the command line: the TOML file, an option for each key, and --print-config."""
    parser = Parser(
        prog="train",
        description="Train a model, from text to an exported model, in any layout.",
        usage="%(prog)s [run.toml] [options]",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument(
        "file", nargs="?", type=Path, default=None, help="a TOML file of settings; options take precedence over it"
    )
    parser.add_argument("--print-config", action="store_true", help="print all settings as a TOML file, and stop")
    groups = {name: parser.add_argument_group(f"[{name}]") for name, _ in keys()}
    for section, each in keys():
        kind, element, _ = type_of(section, each.name)
        if element is dict:  # tables are for the file
            continue
        meaning, default = each.metadata["meaning"], getattr(getattr(Settings(), section), each.name)
        if "default: " not in meaning and default is not None and default != []:
            meaning += f"; default: {shown(default)}"
        option = option_of(each.name)
        if kind is bool:
            groups[section].add_argument(option, action=argparse.BooleanOptionalAction, help=meaning)
        else:
            named = each.metadata.get("choices") and "{" + ",".join(each.metadata["choices"]) + "}"
            groups[section].add_argument(option, help=meaning.replace("%", "%%"), metavar=named)
    return parser


def read_settings(argv: list[str] | None = None) -> Settings:
    """Return the settings of a command line: of its TOML file, and of its options, which take precedence.

    --help and --print-config print, and end the program. Raises SettingsError, in one line.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    given = vars(settings_parser().parse_args(words))
    file = given.pop("file", None)
    values, settings = from_toml(file) if file else {}, Settings()
    prints = given.pop("print_config", False)
    for section, each in keys():
        if each.name in given:
            value = given[each.name]
            values[section, each.name] = from_option(section, each, value) if isinstance(value, str) else value
    for (section, name), value in values.items():
        setattr(getattr(settings, section), name, value)
    check_together(settings)
    if prints:
        print(as_toml(settings), end="")
        raise SystemExit(0)
    return settings


def check_together(settings: Settings) -> None:
    """Raise SettingsError for settings that contradict each other."""
    run, model, optimizer, data = settings.run, settings.model, settings.optimizer, settings.data
    sources = [name for name in ("preset", "hf_config", "from_hf") if getattr(model, name)]
    if len(sources) > 1:
        raise SettingsError(f"{sources[0]} and {sources[1]} both name a model: leave one out")
    sizes = [name for name in ("layers", "hidden", "heads", "kv_heads", "ffn_hidden") if getattr(model, name)]
    if sizes and (model.hf_config or model.from_hf):
        raise SettingsError(f"{sizes[0]} changes a preset; the sizes of {sources[0]} are in its config.json")
    if (run.start_batch or run.batch) > run.batch:
        raise SettingsError(f"start_batch is {run.start_batch}; it must not be above batch, which is {run.batch}")
    if (run.start_batch or run.batch) < run.batch and not run.ramp:
        raise SettingsError("start_batch needs ramp, the steps in which it grows to batch")
    if len(optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in optimizer.betas):
        raise SettingsError(f"betas is {shown(optimizer.betas)}; it must be two numbers from 0 to below 1")
    if optimizer.decay is not None and optimizer.schedule != "wsd":
        raise SettingsError(f"decay is for schedule wsd, and schedule is {optimizer.schedule}")
    if optimizer.schedule == "wsd" and optimizer.warmup + (optimizer.decay or 0) > run.steps:
        raise SettingsError(f"warmup and decay together are longer than the {run.steps} steps of the run")
    if data.sources and data.dataset:
        raise SettingsError("dataset and [[data.sources]] both name the text: leave one out")
    if settings.precision.fp8_gather and settings.precision.fp8 == "none":
        raise SettingsError("fp8_gather needs a recipe: set fp8")
    if settings.checkpoints.export and not settings.checkpoints.checkpoints:
        raise SettingsError("export reads the last checkpoint: set checkpoints")
    if settings.logging.summary and not settings.logging.out:
        raise SettingsError("summary is drawn from the log: set out")
    if settings.evaluation.eval_split and not settings.evaluation.eval_dataset:
        raise SettingsError("eval_split needs eval_dataset")


def as_toml(settings: Settings, meanings: bool = True) -> str:
    """Return the settings as a TOML file; a key that is not set is a comment. meanings: with what each key means."""
    lines = []
    for section in dataclasses.fields(Settings):
        values = getattr(settings, section.name)
        lines += ["", f"[{section.name}]"]
        tables = []
        for each in dataclasses.fields(values):
            value = getattr(values, each.name)
            if meanings:
                choices = each.metadata.get("choices")
                lines.append(f"# {each.metadata['meaning']}{f' ({chr(44).join(choices)})' if choices else ''}")
            if type_of(section.name, each.name)[1] is dict:
                tables = value
                continue
            lines.append(f"# {each.name} =" if value is None else f"{each.name} = {shown(value)}")
        for table in tables:
            lines += ["", f"[[{section.name}.sources]]", *(f"{name} = {shown(value)}" for name, value in table.items())]
    return "\n".join(lines[1:]) + "\n"
