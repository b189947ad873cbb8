"""Kernels on this machine that a program starts, to run a notebook."""

import shutil
import tempfile
import weakref
from pathlib import Path

from jupyter_client import AsyncKernelManager, KernelManager


def use_private_sockets(manager: KernelManager) -> None:
    """Have a kernel that has not started yet talk through sockets in a new folder.

    Jupyter's default is TCP ports that are chosen before the kernel starts: on a busy machine, another program can take
    one in between, and the kernel ends with "Address already in use".
    """
    short = Path("/tmp")  # a socket's path has 104 characters at most, on macOS
    folder = tempfile.mkdtemp(prefix="kernel-", dir=short if short.is_dir() else None)
    weakref.finalize(manager, shutil.rmtree, folder, ignore_errors=True)
    manager.transport, manager.ip = "ipc", f"{folder}/socket"


class LocalKernelManager(AsyncKernelManager):
    """Starts a kernel with sockets of its own."""

    def __init__(self, **settings):
        super().__init__(**settings)
        use_private_sockets(self)
