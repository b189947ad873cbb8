"""What several test modules share."""

import signal
import socket

import pytest
import torch

from course_kit.ranks import Ranks, processes

pytest_plugins = ["suite"]
# A job in the background ignores Ctrl-C, and so would all programs that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
processes.ANSWER_S = 30.0  # a rank of a busy machine may say late where it is; the tests want to hear it


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    for item in items:
        if hasattr(getattr(item, "module", None), "DEVICE"):
            item.add_marker("device")


@pytest.fixture
def port():
    """A port at which a program that the test starts can listen. Held meanwhile, so that nobody else gets it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield held.getsockname()[1]


class Pool:
    """Ranks on the CPU that start when they are first called, and again after they were put away."""

    def __init__(self, size: int):
        self.size, self.started = size, None

    def put_away(self) -> None:
        if self.started:
            self.started.close()
            self.started = None

    def __getattr__(self, name: str):
        if not self.started:
            self.started = Ranks(self.size, "gloo", timeout_s=60)
        return getattr(self.started, name)

    def __call__(self, *args, **kwargs):
        return self.__getattr__("__call__")(*args, **kwargs)


POOLS = {size: Pool(size) for size in (4, 2)}


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu"):
        if not torch.cuda.is_available():
            pytest.skip("needs CUDA")
        if "ranks" in item.path.stem:
            pytest.importorskip("ipyparallel")  # a GPU node may not have it
    # Tests of ranks come first. Then ranks that wait for a call would cost each some 200th of a core.
    if "ranks" not in item.path.stem and not {"ranks", "two"} & set(item.fixturenames):
        put_away()


def pytest_unconfigure():
    put_away()


def put_away() -> None:
    for pool in POOLS.values():
        pool.put_away()


@pytest.fixture(scope="session")
def ranks():
    """Four ranks on the CPU, for all tests that only call them; one that breaks them starts its own."""
    return POOLS[4]


@pytest.fixture(scope="session")
def two():
    """Two ranks on the CPU: half the processes, where two tell as much."""
    return POOLS[2]
