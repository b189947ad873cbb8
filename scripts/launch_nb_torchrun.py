"""Run a program of the course under torchrun, on one process, one machine or a cluster: a notebook's, or train.

    python scripts/launch_nb_torchrun.py NOTEBOOK [options] [any torchrun option] [-- options of the program]
    python scripts/launch_nb_torchrun.py train [options] [any torchrun option] [-- run.toml] [options of the program]

NOTEBOOK is in notebooks/, or the learner's own in workbook/; its cells are exported first. `train` is the training
program of the library, course_lib.train. All errors that can be detected in advance are reported before anything is
written. Exit status: 0; 1 if a rank failed; 2 if the launch could not start; 130 after Ctrl-C.
"""

import argparse
import importlib.util
import os
import shlex
import signal
import sys
from pathlib import Path

if sys.flags.safe_path:  # PYTHONSAFEPATH: the script's folder is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.dont_write_bytecode = True  # before our own imports: a launch that does not start leaves nothing behind

from export import ExportError, module_file, write_modules  # noqa: E402
from launcher import slurm  # noqa: E402
from launcher.first_error import shown  # noqa: E402
from launcher.program import LaunchError, Program, parse, read_program  # noqa: E402
from launcher.run import run, say, stopped  # noqa: E402
from launcher.torchrun import ENVIRONMENT, arguments, complete_options, given, split_notebook  # noqa: E402
from launcher.trial import try_options  # noqa: E402

ENTRY = Path(__file__).resolve().parent / "rank_entry.py"


def launcher_options() -> argparse.ArgumentParser:
    """Return the options of the launcher itself; all others are torchrun's."""
    parser = argparse.ArgumentParser(
        prog="launch_nb_torchrun.py",
        usage="%(prog)s {NOTEBOOK,train} [options] [any torchrun option] [-- options of the program]",
        description="Export a notebook's cells and run its main under torchrun, or run the training program, train.",
        epilog="torchrun's options: python -m torch.distributed.run --help. The program's: %(prog)s train -- --help",
        allow_abbrev=False,
    )
    add, default = parser.add_argument, os.environ.get("PET_NPROC_PER_NODE", "auto")
    add(
        "--nproc-per-node",
        "--nproc_per_node",
        default=default,
        metavar="N",
        help="processes on each machine; auto, the default: the notebook's own number, else one per GPU, else 2",
    )
    add("--no-export", action="store_true", help="run what is exported, whatever the notebook says now")
    add(
        "--reference",
        action="append",
        default=[],
        metavar="NN",
        help="take chapter NN from the reference, not from workbook/; may be repeated",
    )
    add("--unchecked", action="store_true", help="take your answers whose checks have not passed as well")
    add("--dry-run", action="store_true", help="print the torchrun command, or the sbatch script, and do nothing")
    add(
        "--slurm",
        metavar=slurm.FORM,
        help="write an sbatch script to runs/slurm/, and submit it if Slurm is available; cpus: cores per GPU",
    )
    return parser


def differing(program: Program) -> dict[str, str]:
    """Return the modules whose text differs from the file in the library."""
    files = {name: module_file(program.library, name) for name in program.texts}
    standing = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    return {name: text for name, text in program.texts.items() if standing.get(name) != text}


def check_writable(library: Path) -> None:
    """Raise LaunchError if the export could not write, without trying to."""
    folder = library
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise LaunchError(f"cannot export: {shown(folder)} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise LaunchError(f"cannot export: {shown(folder)} is not writable")


def export(program: Program) -> None:
    """Write the modules, and report the cells that the learner has left blank."""
    try:
        write_modules(differing(program), program.library)
    except OSError as error:
        raise LaunchError(f"cannot export to {shown(program.library)}: {error.strerror}") from None
    if program.taken:
        say(f"still blank, taken from the reference: {', '.join(program.taken)}")
    if program.refused:
        refused = ", ".join(f"{name} ({why})" for name, why in program.refused.items())
        say(f"taken from the reference: {refused}; run the checks, or use --unchecked")
    if program.overlay:
        answered = (
            " and ".join(filter(None, [", ".join(program.answered[:-1]), *program.answered[-1:]])) or "no notebook yet"
        )
        say(f"your own answers come from {answered}; all else is the reference's")


def torchrun_command(torchrun: list[str], program: Program, options: list[str]) -> list[str]:
    """Return torchrun's command line: its options, the script that each rank runs, and the script's arguments."""
    command = [*torchrun, str(ENTRY)]
    if program.overlay:
        command += ["--overlay", str(program.overlay)]
    if program.reference_modules:
        command += ["--reference-modules", ",".join(program.reference_modules)]
    return [*command, program.module, *options]


def slurm_script(answered: argparse.Namespace, torchrun: list[str], program: Program, options: list[str]) -> str:
    """Return the sbatch script for this launch: the same launch, once per node, without the export."""
    set_there = {*slurm.SETS} & given(torchrun) | ({"nproc_per_node"} if answered.nproc_per_node != "auto" else set())
    if set_there:
        raise LaunchError(f"--slurm sets --{min(set_there).replace('_', '-')} itself: leave it out")
    command = [sys.executable, str(Path(__file__).resolve()), program.argument]
    extra = [word for chapter in answered.reference for word in ("--reference", chapter)]
    extra += ["--unchecked"] * answered.unchecked + torchrun
    extra += ["--", *options] if options else []
    restarts = arguments(torchrun).max_restarts > 0
    return slurm.script(slurm.parse(answered.slurm), program.path.stem, command, extra, restarts)


def launch(argv: list[str]) -> int:
    """Check everything, then export, then run. Raises LaunchError or ExportError before anything is written."""
    ours, options = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    answered, rest = parse(launcher_options().parse_known_args, ours, "options")
    if importlib.util.find_spec("torch") is None:
        raise LaunchError(f"{sys.executable} has no PyTorch: start the launcher with the Python of .venv")
    notebook, torchrun = split_notebook(rest)
    program = read_program(notebook, answered.reference, not answered.no_export, answered.unchecked)
    if answered.slurm:
        printed = script = slurm_script(answered, torchrun, program, options)
    else:
        torchrun = complete_options(torchrun, answered.nproc_per_node, program.processes())
        command = torchrun_command(torchrun, program, options)
        environment = [f"{name}={shlex.quote(os.environ[name])}" for name in ENVIRONMENT if name in os.environ]
        printed = " ".join(environment + [shlex.join([sys.executable, "-m", "torch.distributed.run", *command])]) + "\n"
    if differing(program):
        check_writable(program.library)
    if problem := try_options(program, options):
        say(f"{program.path} cannot be imported: {problem}")
        return 1
    if answered.dry_run:
        print(printed, end="")
        return 0
    signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on there is something to clean up
    export(program)
    return slurm.submit(script, program.path.stem) if answered.slurm else run(command)


def quit_at_once(number: int, frame: object) -> None:
    """Answer Ctrl-C while torch and the program are imported: an import may swallow the usual exception."""
    os._exit(stopped(signal.Signals(number)))


def main(argv: list[str] | None = None) -> int:
    """Launch, and return the exit status."""
    before = signal.signal(signal.SIGINT, quit_at_once)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it logs a C++ stack for each connection that is lost
    try:
        return launch(sys.argv[1:] if argv is None else argv)
    except (LaunchError, ExportError) as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:
        return stopped(signal.SIGINT)
    except SystemExit as ended:  # a help text, or a signal
        return ended.code or 0
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(main())
