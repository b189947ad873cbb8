"""Check that the rendezvous port is free, or is held by the rendezvous of this same job."""

import argparse
import contextlib
import errno
import socket
import subprocess
import sys
import time

from launcher.program import LaunchError, parse

# Run in a process of its own: against a program that is no store, TCPStore waits without end and logs from C++.
HANDSHAKE = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False, timeout=timedelta(seconds=2))
store.get("torch.rendezvous." + sys.argv[3])
"""
HANDSHAKE_S = 60  # to import torch on a busy machine, and to wait for the key
LOOKS, LOOK_S = 3, 0.2  # how often, and how far apart, to look whether a port is held


def check_port(args: argparse.Namespace, several_nodes: bool) -> None:
    """Raise LaunchError if this node hosts the rendezvous and its port is in use."""
    if args.standalone or args.rdzv_backend not in ("c10d", "static"):
        return
    host, port = endpoint(args)
    keeps_it = args.node_rank == 0 if args.rdzv_backend == "static" else is_this_machine(host)
    if not keeps_it or port == 0 or (reason := held(port)) is None:
        return
    # Another node of this job may run on this machine, and have opened the rendezvous first.
    if args.rdzv_backend == "c10d" and several_nodes and meets_here(host, port, args.rdzv_id):
        return
    raise LaunchError(f"port {port} of {host} cannot be had for the rendezvous: {reason}; name another one")


def endpoint(args: argparse.Namespace) -> tuple[str, int]:
    """Return the host and port of the rendezvous, with torchrun's defaults."""
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    name, default = args.rdzv_endpoint, 29400
    if args.rdzv_backend == "static" and not name:
        name, default = f"{args.master_addr}:{29500 if args.master_port is None else args.master_port}", 29500
    return parse(lambda text: parse_rendezvous_endpoint(text, default), name, "torchrun")


def is_this_machine(host: str) -> bool:
    """Return whether `host` names an address of this machine: no other address can be bound."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
    return False


def held(port: int) -> str | None:
    """Return why no server can listen on `port`; None if one can.

    Tries more than once: another node's launcher may run on this machine and test the port at the same moment.
    """
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    for probe in range(LOOKS):
        time.sleep(LOOK_S if probe else 0)
        try:
            socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
            return None
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return str(error.strerror)
    return "another program holds it"


def meets_here(host: str, port: int, rendezvous_id: str) -> bool:
    """Return whether torchrun's store answers at this port and holds the rendezvous of this id."""
    command, null = [sys.executable, "-c", HANDSHAKE, host, str(port), rendezvous_id], subprocess.DEVNULL
    try:
        return (
            subprocess.run(command, check=False, stdin=null, stdout=null, stderr=null, timeout=HANDSHAKE_S).returncode
            == 0
        )
    except subprocess.TimeoutExpired:
        return False
