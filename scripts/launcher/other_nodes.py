"""Messages between the nodes of one job: the first error, in the store that torchrun keeps for the job.

torchrun ends the ranks of the node where one failed. Ranks on other nodes would wait for it until their group's
timeout, and their launchers would report a lost connection. So the first rank that fails puts its error into the store,
and every rank watches for it.
"""

import contextlib
import json
import os
import time
from datetime import timedelta

LINGER_S = 3.0  # the store may end with this node
NAMES = "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "GROUP_WORLD_SIZE"


def job_here() -> dict[str, str]:
    """Return torchrun's description of the job on a rank; empty without torchrun."""
    return {name: os.environ[name] for name in NAMES if name in os.environ}


class OtherNodes:
    """The first error of one attempt of a job. job: `job_here()` on a rank."""

    def __init__(self, job: dict[str, str]):
        self.job = job
        self.alone = int(job.get("GROUP_WORLD_SIZE", 1)) == 1

    def store(self):
        """Return a client of the job's store, for this attempt. Raises RuntimeError if the host node is gone."""
        from torch.distributed import PrefixStore, TCPStore

        address, port = self.job["MASTER_ADDR"], int(self.job["MASTER_PORT"])
        client = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=5))
        attempt = f"{self.job['TORCHELASTIC_RUN_ID']}/{self.job['TORCHELASTIC_RESTART_COUNT']}"
        return PrefixStore(f"launch/{attempt}", client)

    def tell(self, rank: int, host: str, headline: str) -> None:
        """Put an error into the store, unless it already holds one, and give the other nodes time to read it."""
        with contextlib.suppress(RuntimeError):
            self.store().compare_set("first", "", json.dumps({"rank": rank, "host": host, "headline": headline}))
            time.sleep(LINGER_S)

    def first(self) -> dict | None:
        """Return the first error of the job: its rank, host and headline."""
        with contextlib.suppress(RuntimeError):
            store = self.store()
            return json.loads(store.get("first")) if store.check(["first"]) else None

    def wait(self, interval_s: float) -> dict | None:
        """Wait for the first error. Returns None if the store is gone: then torchrun ends the ranks itself."""
        with contextlib.suppress(RuntimeError):
            store = self.store()
            while not store.check(["first"]):
                time.sleep(interval_s)
            return json.loads(store.get("first"))
