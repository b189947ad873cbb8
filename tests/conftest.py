"""What several test modules share."""

import gc
import os
import signal
import socket

import pytest
import torch

from course_kit.ranks import Ranks, processes

pytest_plugins = ["suite"]
# A job in the background ignores Ctrl-C, and so would all programs that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported: no test asks Hugging Face
processes.ANSWER_S = 30.0  # a rank of a busy machine may say late where it is; the tests want to hear it


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config, items):
    for item in items:
        if hasattr(getattr(item, "module", None), "DEVICE"):
            item.add_marker("device")
    if config.option.markexpr == "device" and torch.cuda.is_available() and block_bytes() >= FIRST_CONFIGURATIONS:
        from triton.runtime.autotuner import Autotuner  # not above: `suite` says first how Triton runs

        for kernel in (each for each in gc.get_objects() if type(each) is Autotuner):
            kernel.configs = kernel.configs[:1]  # as in the interpreter: only results count, and compiling takes long


def block_bytes() -> int:
    """Shared memory that a block may have on this GPU."""
    return torch.cuda.get_device_properties(0).shared_memory_per_block_optin


@pytest.fixture
def port():
    """A port at which a program that the test starts can listen. Held meanwhile, so that nobody else gets it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield held.getsockname()[1]


FIRST_CONFIGURATIONS = 160 * 2**10  # bytes of shared memory that each kernel's first configuration is content with
POOLS: list[Ranks] = []  # those of the tests that only call them
DEADLINE_S = 300  # against a hang: a call with all schedules takes over a minute beside two other workers


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    # Tests of ranks come first. Then ranks that wait for a call would cost each some 200th of a core.
    if "ranks" not in item.path.stem and not {"ranks", "two"} & set(item.fixturenames):
        put_away()
    elif torch.cuda.is_available():
        pytest.importorskip("ipyparallel")  # a GPU node may not have it


def put_away() -> None:
    """End the pools' processes; a later call starts them again."""
    for pool in POOLS:
        pool.close()


@pytest.fixture(scope="session")
def ranks():
    """Four ranks on the CPU, for all tests that only call them; one that breaks them starts its own."""
    with Ranks(4, "gloo", timeout_s=DEADLINE_S) as four:
        POOLS.append(four)
        yield four


@pytest.fixture(scope="session")
def two():
    """Two ranks on the CPU: half the processes, where two tell as much."""
    with Ranks(2, "gloo", timeout_s=DEADLINE_S) as pair:
        POOLS.append(pair)
        yield pair
