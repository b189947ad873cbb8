"""The connections of a process: which it has, and how a thread of it cuts them under another that waits."""

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
