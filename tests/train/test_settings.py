"""The settings of a run: the file, the command line over it, and a line for each mistake."""

import dataclasses

import pytest

from course_lib.train.program import notes
from course_lib.train.schedule import rate_at
from course_lib.train.sections import Optimizer
from course_lib.train.settings import SettingsError, as_toml, keys, read_settings

SOURCES = """
[data]
document_masks = false
[[data.sources]]
dataset = "a.jsonl"
weight = 2
[[data.sources]]
dataset = 'b "quoted"'
"""


def written(tmp_path, text: str) -> str:
    file = tmp_path / "run.toml"
    file.write_text(text)
    return str(file)


def test_the_command_line_takes_precedence_over_the_file(tmp_path):
    file = written(
        tmp_path, "[run]\nsteps = 7\nbatch = 2\n[optimizer]\nbetas = [0.8, 0.9]\n[kernels]\nkernels = true\n"
    )
    settings = read_settings([file, "--steps", "9", "--betas", "0.5,0.6", "--no-kernels", "--no-decay", "a,b"])
    assert (settings.run.steps, settings.run.batch, settings.optimizer.betas) == (9, 2, [0.5, 0.6])
    assert not settings.kernels.kernels and settings.optimizer.no_decay == ["a", "b"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        SOURCES,
        '[data]\ndataset = "a\\u007fb\\n"',
        "[model]\nfrom_hf = 'x'\n[optimizer]\nlr = 1\n[run]\ndrop_tokens = 0\n",
    ],
)
def test_what_print_config_prints_is_read_back(tmp_path, capsys, text):
    file = written(tmp_path, text)
    with pytest.raises(SystemExit) as stop:
        read_settings([file, "--print-config", "--summary", "s", "--out", "l"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    again = read_settings([written(tmp_path, printed)])
    assert again == read_settings([written(tmp_path, text), "--summary", "s", "--out", "l"])
    assert as_toml(again) == printed


def test_an_empty_list_on_the_command_line_empties_that_of_the_file(tmp_path):
    file = written(tmp_path, "[optimizer]\nno_decay = ['embedding']\n")
    assert read_settings([file, "--no-decay", ""]).optimizer.no_decay == []


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    assert read_settings([written(tmp_path, "\ufeff[run]\r\nsteps = 7\r\n")]).run.steps == 7


def test_each_key_has_one_section_a_meaning_and_an_option(capsys):
    names = [each.name for _, each in keys()]
    assert len(names) == len({*names})
    with pytest.raises(SystemExit):
        read_settings(["--help"])
    shown = capsys.readouterr().out
    for _, each in keys():
        assert each.metadata["meaning"][-1] not in ".;"
        assert each.name == "sources" or f"--{each.name.replace('_', '-')}" in shown


MISTAKES = [
    ("[optimizer]\nlearning_rate = 1", "run.toml: [optimizer] has no key learning_rate; it is one of optimizer, lr,"),
    ("[optimizer]\nweight_deacy = 1", "run.toml: [optimizer] has no key weight_deacy; did you mean weight_decay?"),
    ("[optimiser]\nlr = 1", "run.toml: there is no section [optimiser]; did you mean optimizer?"),
    ("lr = 1", "run.toml: lr belongs to [optimizer]"),
    ("run = 3", "run.toml: run is a section: write [run], and its keys below"),
    ("[run]\nlr = 1", "run.toml: [run] has no key lr; it belongs to [optimizer]"),
    ("[run]\nsteps = '9'", 'run.toml: steps in [run] is "9"; it must be a whole number'),
    ("[run]\nsteps = 1.5", "run.toml: steps in [run] is 1.5; it must be a whole number"),
    ("[run]\nsteps = true", "run.toml: steps in [run] is true; it must be a whole number"),
    ("[run]\nsteps = 0", "run.toml: steps in [run] is 0; it must be 1 or more"),
    ("[optimizer]\nlr = nan", "run.toml: lr in [optimizer] is nan; it must be above 0"),
    ("[optimizer]\nlr = inf", "run.toml: lr in [optimizer] is inf; it must be finite"),
    ("[model]\npreset = 'smal'", 'run.toml: preset in [model] is "smal"; did you mean small?'),
    ("[model]\nfrom_hf = ''", "run.toml: from_hf in [model] is empty"),
    ("[compile]\ncompile = 'yes'", 'run.toml: compile in [compile] is "yes"; it must be true or false'),
    (f"[optimizer]\nlr = 1{'0' * 400}", "run.toml: lr in [optimizer] is too large for a number"),
    (f"[run]\nsteps = 1{'0' * 5000}", "run.toml: Exceeds the limit (4300 digits)"),
    ("[optimizer]\nno_decay = ['']", "run.toml: no_decay in [optimizer] has an empty string in it"),
    ("[optimizer]\nbetas = 0.9", "run.toml: betas in [optimizer] is 0.9; it must be a list"),
    ("[optimizer]\nbetas = [1.0, 0.9]", "betas is [1.0, 0.9]; it must be two numbers from 0 to below 1"),
    ("[run\nsteps = 1", "run.toml: Expected ']' at the end of a table declaration"),
]


@pytest.mark.parametrize("text, line", MISTAKES)
def test_a_mistake_in_the_file_is_one_line(tmp_path, text, line):
    with pytest.raises(SettingsError) as error:
        read_settings([written(tmp_path, text)])
    message = str(error.value).replace(f"{tmp_path}/", "")
    assert message.startswith(line) and "\n" not in message


@pytest.mark.parametrize(
    "words, line",
    [
        ("--stepz 3", "there is no option --stepz; did you mean --steps?"),
        ("--steps=x", '--steps is "x"; it must be a whole number'),
        ("--steps", "argument --steps: expected one argument"),
        ("--preset smal", '--preset is "smal"; did you mean small?'),
        ("--betas 0.9", "betas is [0.9]; it must be two numbers"),
        ("missing.toml", "missing.toml: No such file or directory"),
        ("a.toml b", "b is one argument too many; the only one is a TOML file"),
        ("--preset small --from-hf x", "preset and from_hf both name a model: leave one out"),
        ("--hf-config x --layers 3", "layers changes a preset; the sizes of hf_config are in its config.json"),
        ("--start-batch 4", "start_batch needs ramp, the steps in which it grows to batch"),
        ("--start-batch 32", "start_batch is 32; it must not be above batch, which is 16"),
        ("--min-lr 3e0", "--min-lr is 3.0; it must be 1 or less"),
        ("--decay 4", "decay is for schedule wsd, and schedule is cosine"),
        ("--schedule wsd --warmup 30 --decay 30", "warmup and decay together are longer than the 50 steps"),
        ("--fp8-gather", "fp8_gather needs a recipe: set fp8"),
        ("--export x", "export reads the last checkpoint: set checkpoints"),
        ("--summary x", "summary is drawn from the log: set out"),
        ("--eval-split x", "eval_split needs eval_dataset"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(words, line):
    with pytest.raises(SettingsError) as error:
        read_settings(words.split())
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "schedule, rates",
    [
        ("cosine", {1: 0.25, 4: 1.0, 12: 0.55, 20: 0.1}),
        ("linear", {1: 0.25, 4: 1.0, 12: 0.55, 16: 0.325, 20: 0.1}),
        ("constant", {1: 0.25, 4: 1.0, 12: 1.0, 20: 1.0}),
        ("wsd", {1: 0.25, 4: 1.0, 15: 1.0, 16: 0.82, 20: 0.1}),
    ],
)
def test_schedules(schedule, rates):
    optimizer = Optimizer(lr=1.0, warmup=4, schedule=schedule, decay=5 if schedule == "wsd" else None)
    for step, rate in rates.items():
        assert rate_at(step, optimizer, 20) == pytest.approx(rate), step


def test_schedules_without_warmup_or_with_one_step():
    for schedule in ("cosine", "linear", "constant", "wsd"):
        rates = [rate_at(step, Optimizer(lr=2.0, schedule=schedule, min_lr=0.0), 10) for step in range(1, 11)]
        assert rates == sorted(rates, reverse=True) and 0 <= rates[-1] <= 2.0
        assert rate_at(1, dataclasses.replace(Optimizer(lr=2.0), schedule=schedule), 1) > 0


@pytest.mark.parametrize(
    "words, lines",
    [
        ("", []),
        ("--eval-every 2 --eval-share 0.2 --checkpoints c --keep 5 --min-lr 0", []),
        ("--optimizer sgd --betas 0.8,0.9", ['betas has no effect: optimizer is "sgd"']),
        ("--momentum 0.9", ['momentum has no effect: optimizer is "adamw"']),
        ("--schedule constant --min-lr 0", ['min_lr has no effect: schedule is "constant"']),
        ("--save-every 9", ["save_every has no effect: checkpoints is not set"]),
        ("--eval-dataset a.txt", ["eval_dataset has no effect: eval_every is 0"]),
        ("--backend eager", ["backend has no effect: compile is false"]),
        ("--ramp 3", ["ramp has no effect: start_batch is not set, or is batch"]),
        ("--warmup 60", ["warmup is longer than the run: the learning rate stays below 0.002"]),
        ("--cluster h100", ["cluster has no effect: layout is not auto"]),
    ],
)
def test_settings_without_effect_are_named(words, lines):
    assert notes(read_settings(words.split())) == lines


def test_an_empty_option_sets_nothing_and_a_list_may_have_brackets():
    settings = read_settings(["--export", "", "--layers", "", "--betas", "[0.8, 0.9]", "--no-decay", ""])
    assert settings.checkpoints.export is None and settings.model.layers is None
    assert settings.optimizer.betas == [0.8, 0.9] and settings.optimizer.no_decay == []
