"""`compile_launches` of course_kit.gpu.compiled that compiles each kernel once on this machine, for all workers and
runs.

What the compiler made is kept beside Triton's own cache, by all that it was made of: the text of the kernel and of what
it calls, types, constants, hints and options of the launch, the GPU, the compiler's version, and our code round it.
"""

import hashlib
import inspect
import os
import pickle
import platform
from pathlib import Path

import triton

from course_kit.gpu import accesses, compiled, sources
from course_kit.gpu.compiled import Compiled, request
from course_kit.gpu.launches import Launch

FOLDER = Path(triton.knobs.cache.dir) / "compiled-once"
PLACES = ("file", "line")  # of a source: where it stands, which changes nothing


def content(launch: Launch, capability: int) -> str:
    """A name for all that the answer depends on."""
    wanted = dict(request(launch))
    wanted["sources"] = {
        name: {part: value for part, value in source.items() if part not in PLACES}
        for name, source in wanted["sources"].items()
    }
    ours = [inspect.getsource(module) for module in (accesses, compiled, sources)]
    everything = in_order(wanted), capability, triton.__version__, platform.python_version(), ours
    return hashlib.sha256(repr(everything).encode()).hexdigest()


def in_order(value):
    """Dictionaries as sorted lists: the order in which names are found differs from process to process."""
    return sorted((repr(key), in_order(each)) for key, each in value.items()) if isinstance(value, dict) else value


def compile_launches(launches: list[Launch], capability: int = 90) -> list[Compiled]:
    """As course_kit.gpu.compiled.compile_launches."""
    files = [FOLDER / content(launch, capability) for launch in launches]
    missing = {file: launch for file, launch in zip(files, launches, strict=True) if not file.exists()}
    if missing:
        FOLDER.mkdir(parents=True, exist_ok=True)
        for file, made in zip(missing, compiled.compile_launches([*missing.values()], capability), strict=True):
            own = file.with_suffix(f".{os.getpid()}")
            own.write_bytes(pickle.dumps(made))
            own.replace(file)  # whole, or not at all
    return [pickle.loads(file.read_bytes()) for file in files]
