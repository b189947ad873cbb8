"""The connections of a process: list them, serve gloo's by one thread, give NCCL's streams priority, and cut them while
another thread waits on them.
"""

import contextlib
import os
import socket
import stat
from typing import Any


def sockets() -> dict[int, int]:
    """Return the open sockets of this process: inode by file descriptor."""
    inodes = {}
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # closed in between
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                inodes[int(name)] = status.st_ino
    return inodes


def cut_connections(spared: set[int]) -> None:
    """Shut down every TCP connection of this process but the inodes in `spared`, which wakes up waiting threads."""
    for descriptor, inode in sockets().items():
        with contextlib.suppress(OSError):  # closed in between, or a listening socket, which has no peer
            connection = socket.socket(fileno=os.dup(descriptor))
            with connection:
                if inode not in spared and connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()
                    connection.shutdown(socket.SHUT_RDWR)


def prepare_backend(backend: str) -> None:
    """Prepare a backend before the default group is made. NCCL's streams get a high priority, unless
    TORCH_NCCL_HIGH_PRIORITY is set: a collective then takes the multiprocessors that become free before the computation
    that overlaps it does.
    """
    if backend == "gloo":
        share_gloo_device()
    else:
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")


def share_gloo_device() -> None:
    """Give all gloo groups that this process makes from now on one device. PyTorch gives each group a device, whose
    thread wakes up 100 times per second: with ten groups on 8 ranks, a tenth of a core for nothing. Raises ValueError
    if GLOO_SOCKET_IFNAME names a network interface that this machine does not have.
    """
    import torch.distributed as dist

    gloo: Any = dist.ProcessGroupGloo  # its stub lacks the options
    if hasattr(gloo, "shared_devices"):
        return
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]  # as PyTorch reads it
    interfaces = [name for _, name in socket.if_nameindex()]
    if missing := [name for name in names if name not in interfaces]:
        raise ValueError(f"GLOO_SOCKET_IFNAME names {missing[0]}, and this machine has {', '.join(interfaces)}")
    gloo.shared_devices = [gloo.create_device(interface=name) for name in names] or [gloo.create_default_device()]
    of_torch = gloo.__init__

    def init(self, store, rank: int, size: int, timeout) -> None:
        options = gloo._Options()
        options._timeout, options._devices = timeout, gloo.shared_devices
        of_torch(self, store, rank, size, options)

    gloo.__init__ = init
