"""The training program without the course's launcher, for a machine that has only the library.

    python -m course_lib.train run.toml --steps 10                          one process
    torchrun --nproc-per-node 8 -m course_lib.train run.toml --steps 10     one process per GPU

A process joins the default group, NCCL on GPU number LOCAL_RANK or gloo on the CPU, and calls `program.main`. Exit
status: 0; 1 after an error; 2 for settings that cannot be used.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
import traceback

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the imports, which take seconds, without a traceback

import torch
import torch.distributed as dist

from course_lib.train import program

GRACE_S = 10.0  # torchrun ends all ranks when one has ended: rank 0 has to print first


def join_group() -> dist.Store:
    """Initialize the default process group, and return its store. Without torchrun the group is this process alone,
    and needs no port.
    """
    store, rank, world_size = dist.HashStore(), 0, 1
    if "RANK" in os.environ:
        store, rank, world_size = next(dist.rendezvous("env://"))
    backend, device = "gloo", None
    if torch.cuda.is_available():
        backend, local_rank = "nccl", int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(local_rank)
        # On a single rank NCCL, and the GPU memory it takes, can wait for the first collective.
        device = torch.device("cuda", local_rank) if world_size > 1 else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=device)
    return store


def fails_first(store: dist.Store) -> bool:
    """Return True on the first rank that calls it: most errors are raised by all ranks, and printed once."""
    with contextlib.suppress(RuntimeError):  # rank 0, which may host the store, has printed its error and ended
        return store.add(f"errors/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", 1) == 1
    return False


def run(argv: list[str]) -> int:
    """Run the program, and return the exit status. Prints one line for a file or a layout that cannot be used."""
    message = io.StringIO()  # --help, --print-config and settings that cannot be used end here, without a group
    try:
        with contextlib.ExitStack() as silent:
            if os.environ.get("RANK", "0") != "0":
                for redirect in (contextlib.redirect_stdout, contextlib.redirect_stderr):
                    silent.enter_context(redirect(message))
            program.options(argv)
    except SystemExit as stop:
        if stop.code and message.getvalue():  # rank 0 tells the same line, and torchrun then ends this rank
            time.sleep(GRACE_S)
            sys.stderr.write(message.getvalue())  # this machine alone has the error
        raise
    store = join_group()
    try:
        program.main(argv)
    except (ValueError, SystemExit) as error:
        if isinstance(error, SystemExit) and not isinstance(error.code, str):
            raise
        if fails_first(store):
            print(f"train: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        text = " ".join(str(error).split())
        if not any(words in text for words in ("out of memory", "enough memory", "allocate memory")):
            raise
        needs_less = "a smaller mb or seq, recompute full, or attention flash needs less"
        print(f"train: error: {text[:200]}; {needs_less}", file=sys.stderr)
        return 1
    dist.destroy_process_group()
    return 0


def main(argv: list[str]) -> None:
    """Run the program and end the process at once: a gloo rank may abort while the interpreter shuts down."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        status = run(argv)
    except SystemExit as stop:
        status = int(stop.code or 0)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("train: stopped by Ctrl-C", file=sys.stderr)
        status = 130
    except BrokenPipeError:  # of head
        status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader, such as head, has closed the pipe
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
