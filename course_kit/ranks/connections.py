"""The connections of a process: which it has, how gloo's are served by one thread, how NCCL's come first, and how they
are cut under another thread that waits.
"""

import contextlib
import os
import socket
import stat


def sockets() -> dict[int, int]:
    """The open sockets of this process: file descriptor and inode."""
    found = {}
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def cut_connections(spared: set[int]) -> None:
    """Shut every TCP connection of this process down, save for the inodes of `spared`: whoever waits on it wakes up."""
    for descriptor, inode in sockets().items():
        with contextlib.suppress(OSError):  # closed meanwhile, or a listening socket, which has no peer
            connection = socket.socket(fileno=os.dup(descriptor))
            with connection:
                if inode not in spared and connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()
                    connection.shutdown(socket.SHUT_RDWR)


def prepare_backend(backend: str) -> None:
    """Before the default group is made. NCCL's streams get a high priority, unless TORCH_NCCL_HIGH_PRIORITY is set: a
    collective then takes the multiprocessors that become free before the computation that is to hide it.
    """
    if backend == "gloo":
        share_gloo_device()
    else:
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")


def share_gloo_device() -> None:
    """Give all gloo groups that this process makes from now on one device. PyTorch gives each its own, whose thread
    wakes up a hundred times a second: with ten groups on 8 ranks, a tenth of a core for nothing. Raises ValueError
    where GLOO_SOCKET_IFNAME names a network interface that is not there.
    """
    import torch.distributed as dist

    gloo = dist.ProcessGroupGloo
    if hasattr(gloo, "shared_devices"):
        return
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]  # as PyTorch reads it
    there = [name for _, name in socket.if_nameindex()]
    if missing := [name for name in names if name not in there]:
        raise ValueError(f"GLOO_SOCKET_IFNAME names {missing[0]}, and this machine has {', '.join(there)}")
    gloo.shared_devices = [gloo.create_device(interface=name) for name in names] or [gloo.create_default_device()]
    of_torch = gloo.__init__

    def init(self, store, rank: int, size: int, timeout):
        options = gloo._Options()
        options._timeout, options._devices = timeout, gloo.shared_devices
        of_torch(self, store, rank, size, options)

    gloo.__init__ = init
