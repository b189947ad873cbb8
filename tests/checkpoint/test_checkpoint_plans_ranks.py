"""course_lib.checkpoint.plans on 4 ranks: what is planned, read and sent, and how often. CPU, gloo."""

import contextlib
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from course_lib.checkpoint import files
from course_lib.checkpoint.checkpoints import Checkpoints, load, save
from course_lib.checkpoint.chunks import Chunk
from course_lib.checkpoint.files import ChunkReader
from course_lib.checkpoint.hugging_face import to_hf
from course_lib.checkpoint.planners import ChunkLoadPlanner, ChunkSavePlanner, read_into
from course_lib.five_d.layouts import Layout
from course_lib.five_d.meshes import build_mesh
from course_lib.five_d.model import parallelize
from course_lib.single_gpu.model import ModelConfig

CONFIG = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=44, vocab=97, tied=True)
OBJECTS = ("gather_object", "scatter_object_list", "broadcast_object_list")  # how DCP sends plans, places, metadata


def parallel_of(words: str, seed: int = 0):
    """On a rank: a model that has done a step."""
    layout = Layout.parse(words)
    parallel = parallelize(CONFIG, layout, build_mesh(layout), seed=seed, lr=1e-3)
    tokens = torch.randint(97, (4, 17), generator=torch.Generator().manual_seed(seed))
    own = tokens.chunk(layout.dp)[parallel.mesh.dp.rank()]
    parallel.step(own[:, :-1], own[:, 1:])
    return parallel


@contextlib.contextmanager
def counted():
    """Counts what this rank does: chunks it plans itself, chunks of all ranks it plans, objects it sends or gets."""
    found = {"own": 0, "of all": 0, "objects": 0}
    with contextlib.ExitStack() as stack:

        def watch(place, name: str, kind: str, count):
            whole = getattr(place, name)

            def call(*args, **kwargs):
                found[kind] += count(*args)
                return whole(*args, **kwargs)

            stack.enter_context(mock.patch.object(place, name, call))

        chunks = lambda planner, *_: sum(map(len, planner.state_dict.values()))  # noqa: E731
        watch(ChunkSavePlanner, "create_local_plan", "own", chunks)
        watch(ChunkSavePlanner, "create_global_plan", "of all", lambda _, plans: sum(len(plan.items) for plan in plans))
        for name in OBJECTS:
            watch(dist, name, "objects", lambda *_: 1)
        yield found


def done(checkpoints: Checkpoints, step: int) -> dict:
    """What `counted` counts of a save that goes well."""
    with counted() as found:
        checkpoints.save(step)
        checkpoints.wait()
    assert checkpoints.failure is None, checkpoints.failure
    return found


# A save's plan.


def plans_of_saves(root) -> list[tuple[dict, int]]:
    """On a rank: counts and own chunks of five saves; before the fourth rank 1's moments get another dtype."""
    parallel = parallel_of("dp4,zero1")
    checkpoints, found = Checkpoints(parallel, root, keep=9), []
    for step in range(1, 6):
        if step == 4 and dist.get_rank() == 1:
            for state in parallel.sharding.optimizer.state.values():
                state["exp_avg"] = state["exp_avg"].double()
        found.append((done(checkpoints, step), len(checkpoints.copies)))
    return found


def test_chunks_are_planned_at_the_first_save_and_when_they_change(ranks, tmp_path):
    """Changed on one rank, all ranks plan anew: the plan is one of all of them. The index is the same file."""
    of_ranks = ranks(plans_of_saves, tmp_path)
    for i in range(5):
        counts, own = zip(*(saves[i] for saves in of_ranks), strict=True)
        made = i in (0, 3)
        assert [each["own"] for each in counts] == [made * chunks for chunks in own], i
        assert [each["of all"] for each in counts] == [made * sum(own), 0, 0, 0], i
        assert all((each["objects"] > 0) == made for each in counts), i
    index = {step: (tmp_path / f"step-{step:09d}" / ".metadata").read_bytes() for step in range(1, 6)}
    assert index[1] == index[2] == index[3] and index[4] == index[5] != index[1]


def rows(sizes: list[int], value: float) -> dict[str, list[Chunk]]:
    """On a rank: its rows of a matrix [8, 3] that is cut into so many rows a rank, all of them `value`."""
    rank = dist.get_rank()
    return {"w": [Chunk((sum(sizes[:rank]), 0), (8, 3), torch.full((sizes[rank], 3), value))] if sizes[rank] else []}


def cut_anew(root) -> list[float]:
    """On a rank: what three saves have of a matrix that is 1, 2, 3; before the third its rows lie elsewhere."""
    checkpoints = Checkpoints(parallel_of("dp4"), root, keep=9)
    for step, sizes in enumerate(([2, 2, 2, 2], [2, 2, 2, 2], [1, 3, 4, 0]), 1):
        checkpoints.model_chunks = lambda step=step, sizes=sizes: rows(sizes, float(step))
        checkpoints.save(step)
        checkpoints.wait()
        assert checkpoints.failure is None, checkpoints.failure
    found = []
    for step in (1, 2, 3):
        whole = torch.full((8, 3), torch.nan)
        read_into({"w": [Chunk((0, 0), (8, 3), whole)]}, ChunkReader(root / f"step-{step:09d}"))
        found.append(whole.unique().tolist())
    return found


def test_the_same_names_in_other_places_are_planned_anew(ranks, tmp_path):
    """By the old plan half of the rows would be missing, or be those of others."""
    assert ranks(cut_anew, tmp_path) == [[[1.0], [2.0], [3.0]]] * 4


def fails_between(root) -> tuple[list[dict], list[str], list[str]]:
    """On a rank: counts of three good saves, what is said of the one before the last, and what is there: rank 2 finds
    its chunks elsewhere in its file than they were.
    """
    lines = []
    checkpoints = Checkpoints(parallel_of("dp4,zero1"), root, report=lines.append)
    found = [done(checkpoints, 1), done(checkpoints, 2)]
    if dist.get_rank() == 2:
        checkpoints.writer.results.reverse()
    checkpoints.save(3)
    checkpoints.wait()
    assert checkpoints.failure == "the chunks are not where the index has them"
    return [*found, done(checkpoints, 4)], lines, sorted(each.name for each in root.iterdir())


def test_a_save_that_does_not_fit_its_index_fails_and_the_next_is_planned_anew(ranks, tmp_path):
    for rank, (saves, lines, names) in enumerate(ranks(fails_between, tmp_path)):
        assert [each["own"] > 0 for each in saves] == [True, False, True]
        assert len(lines) == (rank == 0) and names == ["step-000000002", "step-000000004"]


# A load's index.


@contextlib.contextmanager
def files_read():
    """Collects the names of files that course_lib.checkpoint.files opens."""
    names = []

    def opening(path, *args, **kwargs):
        names.append(Path(path).name)
        return open(path, *args, **kwargs)

    with mock.patch.object(files, "open", opening, create=True):
        yield names


def reads(words: str, folder: Path) -> dict:
    """On a rank, of a load: how often it opens .metadata; which tensors and how many chunks it has an index of."""
    parallel, known, whole = parallel_of(words, seed=1), {}, ChunkLoadPlanner.set_up_planner

    def set_up(planner, chunks, metadata=None, is_coordinator=False):
        count = sum(len(each.chunks) for each in metadata.state_dict_metadata.values())
        known.update(names=set(metadata.state_dict_metadata), chunks=count, places=len(metadata.storage_data))
        known["own"] = set(chunks)
        whole(planner, chunks, metadata, is_coordinator)

    with files_read() as names, mock.patch.object(ChunkLoadPlanner, "set_up_planner", set_up):
        load(parallel, folder)
    return known | {"opened": names.count(".metadata")}


@pytest.mark.parametrize("words", ["pp2,tp2,mb2", "dp4,zero1", "dp4,zero3"])
def test_one_rank_reads_the_index_and_each_keeps_its_own_of_it(ranks, tmp_path, words):
    """.metadata is opened once for its checksum, and once to be read. Of a stage's tensors, the other knows nothing."""
    ranks(saved, "dp4,zero1", tmp_path)
    folder = tmp_path / "step-000000001"
    index = ChunkReader(folder).read_metadata()
    of_ranks = ranks(reads, words, folder)
    assert sum(each["opened"] for each in of_ranks) == 2, [each["opened"] for each in of_ranks]
    for each in of_ranks:
        assert each["names"] == each["own"] <= set(index.state_dict_metadata)
        assert each["chunks"] == each["places"] < 0.8 * len(index.storage_data)


def test_the_index_is_read_once_for_all_tensors_of_a_model_of_transformers(ranks, tmp_path):
    pytest.importorskip("transformers")
    ranks(saved, "dp4,zero1", tmp_path)
    with files_read() as names:
        to_hf(tmp_path / "step-000000001", tmp_path / "hf")
    assert names.count(".metadata") == 2


def saved(words: str, root) -> None:
    save(parallel_of(words), root, 1)
