"""course_lib.checkpoint.groups on 4 ranks: open files of a gloo group, and the limit of them. CPU, gloo."""

import contextlib
import os
import resource
from unittest import mock

import pytest
import torch.distributed as dist

from course_lib.checkpoint import groups
from course_lib.checkpoint.checkpoints import Checkpoints, load
from course_lib.checkpoint.files import CheckpointError
from course_lib.collectives.traffic import count_traffic
from course_lib.five_d.layouts import Layout
from course_lib.five_d.meshes import build_mesh
from course_lib.five_d.model import parallelize
from course_lib.single_gpu.model import ModelConfig

CONFIG = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=44, vocab=97, tied=True)


def opened() -> int:
    return len(os.listdir("/dev/fd"))


@contextlib.contextmanager
def soft_limit(files_more: int | None):
    """So many files more may be opened; None: as many as before. The limit is as it was afterwards."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        if files_more is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (opened() + files_more, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def group_on(own_limits: list) -> tuple[int, int]:
    """On a rank whose soft limit leaves so many files: by how much a new group has raised it, and the group's files."""
    dist.barrier()
    with soft_limit(own_limits[dist.get_rank()]):
        soft, before = resource.getrlimit(resource.RLIMIT_NOFILE)[0], opened()
        group = groups.host_group()
        dist.barrier(group)
        raised, files_of_it = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - soft, opened() - before
        dist.destroy_process_group(group)
    return raised, files_of_it


def test_the_limit_of_open_files_is_raised_to_what_a_group_takes(ranks):
    """No file more is too few for a group of four; where there is room enough, nothing changes."""
    of_ranks = ranks(group_on, [0, None, 0, None])
    for rank, (raised, taken) in enumerate(of_ranks):
        assert taken <= 4 + groups.GLOO_FILES
        assert raised == 0 if rank % 2 else 0 < raised <= 4 + groups.GLOO_FILES + groups.SPARE_FILES, of_ranks


def refused(verb: str, root) -> str:
    """On a rank: what a save or a load says where rank 2 may open but three files more."""
    layout, limits = Layout.parse("dp4"), resource.getrlimit
    parallel = parallelize(CONFIG, layout, build_mesh(layout))
    few = lambda kind: (opened(), opened() + 3)  # noqa: E731
    with (
        mock.patch.object(resource, "getrlimit", few if dist.get_rank() == 2 else limits),
        pytest.raises(CheckpointError) as raised,
    ):
        if verb == "save":
            Checkpoints(parallel, root)
        else:
            load(parallel, root / "step-000000001")
    return str(raised.value)


@pytest.mark.parametrize("verb", ["save", "load"])
def test_a_hard_limit_that_is_too_low_is_a_line_on_all_ranks(ranks, tmp_path, verb):
    messages = set(ranks(refused, verb, tmp_path))
    assert len(messages) == 1
    message = messages.pop()
    assert message.startswith("a gloo group of 4 ranks needs ") and "open files in rank 2" in message
    assert "(ulimit -n)" in message and "\n" not in message


TAKEN = 1024 + groups.GLOO_FILES  # by a group of 1,024 ranks
WANTED = TAKEN + groups.SPARE_FILES


@pytest.mark.parametrize(
    "soft, hard, raised",
    [
        (1024, 10**6, WANTED),
        (1024, resource.RLIM_INFINITY, WANTED),
        (1024, TAKEN, TAKEN),  # enough for the group, and nothing beyond the hard limit
        (WANTED, WANTED, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_a_thousand_ranks(monkeypatch, soft, hard, raised):
    """Limits are those of so many files beside those that are open; the hard one stays as it is."""
    files, given = opened(), []
    more = [limit if limit == resource.RLIM_INFINITY else files + limit for limit in (soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(more))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: given.append(limits))
    groups.allow_connections(1024)
    assert given == ([] if raised is None else [(files + raised, more[1])])


def test_without_such_limits_nothing_happens():
    with mock.patch.object(groups, "resource", None):
        groups.allow_connections(10**9)


def outcomes(failing_rank: int | None) -> tuple:
    """Return, on a rank, what gather_or_raise and run_or_raise return or raise, and the bytes they send."""
    rank = dist.get_rank()

    def work() -> str:
        if rank == failing_rank:
            raise OSError("disk full")
        return f"{rank}" * 10_000

    results: list = []
    sent = []
    for call in (
        lambda: groups.gather_or_raise(dist.group.WORLD, lambda: work()[:1]),
        lambda: groups.gather_or_raise(None, lambda: work()[:1]),
        lambda: groups.run_or_raise(dist.group.WORLD, work),
    ):
        with count_traffic() as traffic:
            try:
                results.append(call())
            except CheckpointError as error:
                results.append(str(error))
        sent.append(traffic.bytes)
    return results, sent


def test_gather_or_raise_returns_all_results_and_run_or_raise_sends_none(ranks):
    for rank, (results, sent) in enumerate(ranks(outcomes, None)):
        assert results == [["0", "1", "2", "3"], ["0", "1", "2", "3"], f"{rank}" * 10_000]
        assert max(sent) < 3 * 100


def test_work_that_fails_on_one_rank_fails_on_all(ranks):
    for results, _ in ranks(outcomes, 2):
        assert results == ["rank 2: OSError: disk full"] * 3
