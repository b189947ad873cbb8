"""A store for the ranks of one rendezvous round: a prefix of torchrun's store that no earlier round has used.

torchrun keeps one store per job. A restart, or a node that joins or leaves, begins a new round with new ranks; in torch
2.13 they then find the addresses of earlier ranks, which no longer answer, under the same keys. The restart count is no
solution: each node has its own. So rank 0 makes up a name for the round and sends it to each rank that asks. Each
question and its answer have their own key, which no other round can know.
"""

import contextlib
import threading
import time
import uuid
from datetime import timedelta


def round_store(address: str, port: int, rank: int, world_size: int, keeps_it: bool = False) -> object:
    """Return the store of this round. keeps_it: this rank hosts the store, since torchrun does not."""
    from torch.distributed import PrefixStore, TCPStore

    def client():
        return TCPStore(address, port, is_master=False, timeout=timedelta(minutes=10))

    store = TCPStore(address, port, is_master=True, wait_for_workers=False) if keeps_it else client()
    if rank == 0:
        name = uuid.uuid4().hex
        threading.Thread(target=answer, args=(client(), name, world_size - 1), daemon=True).start()
    else:
        name = ask(store)
    return PrefixStore(f"round/{name}", store)


def ask(store) -> str:
    """Ask rank 0 for the name of the round, and wait for the answer."""
    question = uuid.uuid4().hex
    store.set(f"question/{store.add('questions', 1)}", question)
    name = store.get(f"answer/{question}").decode()
    store.add(f"joined/{name}", 1)
    return name


def answer(store, name: str, others: int) -> None:
    """Answer until all others have joined. Answers questions of earlier rounds too, which no rank reads."""
    answered = set()
    with contextlib.suppress(RuntimeError):  # the store has gone: the launch is over
        while store.add(f"joined/{name}", 0) < others:
            for number in range(1, store.add("questions", 0) + 1):
                if number not in answered and store.check([f"question/{number}"]):
                    store.set("answer/" + store.get(f"question/{number}").decode(), name)
                    answered.add(number)
            time.sleep(0.02)
