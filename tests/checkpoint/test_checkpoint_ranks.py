"""course_lib.checkpoint.checkpoints on 2 and 4 ranks: any layout to any other, bit by bit; damage, and what fails.
CPU.
"""

import json
import os
import pickle
import resource
import shutil
import tempfile
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_kit.ranks.outcome import LOST_PEER
from course_lib.checkpoint.checkpoints import Checkpoints, load, save
from course_lib.checkpoint.chunks import Chunk, fill, state_chunks, weight_chunks
from course_lib.checkpoint.files import ABOUT, ChunkReader, digest, sealed
from course_lib.checkpoint.staging import synchronize_for_save
from course_lib.expert_parallel.router import take_counts, update_bias
from course_lib.five_d import model
from course_lib.five_d.layouts import Layout
from course_lib.five_d.meshes import build_mesh
from course_lib.five_d.model import parallelize
from course_lib.single_gpu.model import ModelConfig

# 97 tokens go on no 2 ranks, 2 K/V heads are copied on 4; 2 layers, embedding and head fill 4 stages.
SIZES = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn_hidden": 44, "vocab": 97}
MOE = {"experts": 4, "top_k": 2, "ffn_hidden": 32, "aux_loss_coeff": 0.01}
OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
}


def parallel_of(
    words: str, moe: dict | None = None, optimizer: str = "AdamW", seed: int = 0, dtype=torch.float32, **sizes
):
    """On a rank: what `parallelize` makes of a layout; sizes: others than SIZES."""
    layout, (make, settings) = Layout.parse(words), OPTIMIZERS[optimizer]
    config = ModelConfig(**SIZES | {"tied": True} | sizes)
    choices = {"moe": moe, "seed": seed, "dtype": dtype, "optimizer_cls": make}
    return parallelize(config, layout, build_mesh(layout), **choices, **settings)


def stepped(parallel, step: int, sequences: int = 4) -> float:
    """The loss of a step, the same whatever the layout; routers' biases move afterwards."""
    tokens = torch.randint(97, (sequences, 17), generator=torch.Generator().manual_seed(step))
    own = tokens.chunk(parallel.layout.dp)[parallel.mesh.dp.rank()]
    loss, _ = parallel.step(own[:, :-1], own[:, 1:])
    counts = take_counts(parallel.stages)
    if counts.numel():
        update_bias(parallel.stages, counts, 0.01)
    return loss.item()


def chunks_now(parallel) -> dict[str, list[Chunk]]:
    """This rank's chunks of weights, buffers and states."""
    states = synchronize_for_save(parallel).state
    return weight_chunks(parallel) | state_chunks(parallel, states)


def whole(parallel) -> dict[str, torch.Tensor]:
    """On each rank, whole: all weights, buffers and states. Copies are the same in each bit, and nothing is missing.
    Collective.
    """
    arrays = {  # pickled far sooner than tensors
        name: [chunk._replace(values=chunk.values.detach().cpu().numpy()) for chunk in chunks]
        for name, chunks in chunks_now(parallel).items()
    }
    of_all: list = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, arrays)
    found = {}
    for name in sorted(set().union(*of_all)):
        arrived = [chunk for each in of_all for chunk in each.get(name, [])]
        chunks = [chunk._replace(values=torch.from_numpy(chunk.values)) for chunk in arrived]
        found[name] = torch.full(chunks[0].full_shape, torch.nan)
        fill([Chunk((0,) * found[name].dim(), chunks[0].full_shape, found[name])], chunks)
        assert not found[name].isnan().any(), f"{name}: nobody has some of it"
        for chunk in chunks:
            cut = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.values.shape, strict=True))
            assert torch.equal(found[name][cut], chunk.values), f"{name} at {chunk.offsets}: copies differ"
    return found


def places(parallel) -> set[tuple]:
    """What this rank has of which tensors."""
    chunks = chunks_now(parallel)
    return {
        (name, chunk.full_shape, chunk.offsets, chunk.values.shape) for name, each in chunks.items() for chunk in each
    }


def own_unequal(parallel, expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of what this rank has, and has not as `expected` has it in every bit."""
    wrong = set()
    for name, chunks in chunks_now(parallel).items():
        for chunk in chunks:
            cut = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.values.shape, strict=True))
            if name not in expected or not torch.equal(expected[name][cut], chunk.values):
                wrong.add(name)
    return sorted(wrong)


def unequal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of what is not the same in every bit."""
    return sorted(
        name
        for name in found.keys() | expected.keys()
        if name not in found or name not in expected or not torch.equal(found[name], expected[name])
    )


# From any layout to any other.


def chained(texts: list[str]) -> list[tuple[str, str]]:
    """(saved in, loaded in): each layout loads from the one before it, where it is new, afterwards from the next."""
    places = range(len(texts))
    pairs = [(texts[i - 1], texts[i]) for i in places] + [(texts[(i + 1) % len(texts)], texts[i]) for i in places]
    return list(dict.fromkeys(pairs))


def exchanged(texts: list[str], pairs: list[tuple], root, options: dict, steps: int = 1, sequences: int = 4):
    """On a rank: a checkpoint of each layout after so many steps, loaded as `pairs` say, and in the same layout.

    Returns what differs, by (saved in, loaded in); and the losses after it, beside those of the run that was not
    interrupted: of two steps in the same layout, of one in another that loads first.
    """
    saved, goes_on, wrong, losses = {}, {}, {}, {}
    for text in texts:
        parallel = parallel_of(text, **options)
        for step in range(steps):
            stepped(parallel, step, sequences)
        saved[text] = whole(parallel)
        (root / text).mkdir(exist_ok=True)
        save(parallel, root / text, steps, {"position": 8 * steps})
        assert not own_unequal(parallel, saved[text])
        goes_on[text] = [stepped(parallel, steps + i, sequences) for i in range(2)]
    for target in texts:
        parallel = parallel_of(target, seed=1, **options)
        for number, source in enumerate([*(source for source, to in pairs if to == target), target]):
            about = load(parallel, root / source / f"step-{steps:09d}")
            assert (about["step"], about["position"], about["layout"]) == (steps, 8 * steps, str(Layout.parse(source)))
            if number == 0:  # all of it is there, on all ranks together; then it is enough that each has the same parts
                names, parts = unequal(whole(parallel), saved[source]), places(parallel)
            else:
                names = own_unequal(parallel, saved[source])
                assert places(parallel) == parts, (source, target)
            if names:
                wrong[source, target] = names
            if number == 0 or source == target:
                after = range(2 if source == target else 1)
                losses[source, target] = [stepped(parallel, steps + i, sequences) for i in after], goes_on[source]
        whole(parallel)
    return wrong, losses


def check_exchanged(of_ranks: list[tuple[dict, dict]], relative: float = 1e-5) -> None:
    for wrong, losses in of_ranks:
        assert not wrong, wrong
        for (source, target), (found, expected) in losses.items():
            if source == target:
                assert found == expected, source
            else:  # the first: what the step before made of it is another order of sums
                assert found[0] == pytest.approx(expected[0], rel=relative), (source, target)


# As few micro-batches as each can have: what is saved does not depend on them.
TIED = ["dp4", "dp4,zero1", "dp2,tp2,sp,zero2,mb2", "dp4,zero3", "pp2,tp2,mb2", "dp2,pp2,zero3,keep"]
TIED += ["cp2,pp2,interleaved,mb2", "dp4,zero3,rep2"]
SHARING = ["dp2,pp2,zero1,mb2", "dp2,pp2,zero2,zb-h1,mb2", "dp2,pp2,zero1,zb-v,mb2", "dp2,pp2,dualpipe"]
UNTIED = ["tp4,mb8", "dp2,pp2,zero1,zb-v,mb2", "dp2,cp2,zero3,mb4", "dp2,pp2,dualpipe", "dp2,tp2,sp,zero3,rep2,mb4"]
MIXTURES = ["dp4,ep2", "dp2,tp2,ep2,zero1,mb2", "dp2,pp2,ep2,zero3,keep", "dp4,ep4,zero2"]


def test_any_layout_loads_what_any_other_has_saved(ranks, tmp_path):
    """Weights and AdamW's states are bit-equal on all ranks; losses go on the same, in other layouts within 1e-5."""
    check_exchanged(ranks(exchanged, TIED, chained(TIED), tmp_path, {}))


def test_what_computes_in_16_bits_is_saved_in_32(ranks, tmp_path):
    """Every bit of the float32 weights comes back, from and to layouts that have BF16 weights beside them."""
    texts = ["dp4", "dp2,tp2,sp,zero2,mb2", "dp2,pp2,zero3,keep", "dp2,pp2,zero1,mb2"]
    narrow = {"dtype": torch.bfloat16}
    check_exchanged(ranks(exchanged, texts, chained(texts), tmp_path, narrow), relative=2e-3)


def test_layouts_with_an_untied_head(ranks, tmp_path):
    check_exchanged(ranks(exchanged, UNTIED, chained(UNTIED), tmp_path, {"tied": False}, sequences=8))


def test_stages_that_share_the_tied_embedding(ranks, tmp_path):
    """The first and the last stage each have a copy of it. ZeRO cuts its states where they lie in a stage's bucket: it
    is as large as all the rest of a stage here, and cut at different elements.
    """
    pairs = [pair for text in SHARING for pair in ((text, "dp4,mb2"), ("dp4,mb2", text))]
    check_exchanged(ranks(exchanged, [*SHARING, "dp4,mb2"], pairs, tmp_path, {"vocab": 401}, sequences=8))


def test_mixtures_and_the_biases_of_their_routers(ranks, tmp_path):
    """Experts are cut over ranks and widths; biases, which move after each step, are buffers."""
    found = ranks(exchanged, MIXTURES, chained(MIXTURES), tmp_path, {"moe": MOE})
    check_exchanged(found)
    assert any(name.endswith("router.bias") for name in ranks(names_saved, tmp_path / MIXTURES[0], 1)[0])


def names_saved(root, step: int) -> set[str]:
    return set(ChunkReader(root / f"step-{step:09d}").read_metadata().state_dict_metadata)


@pytest.mark.parametrize("optimizer, states", [("momentum", {"momentum_buffer"}), ("SGD", set())])
def test_other_optimizers(ranks, tmp_path, optimizer, states):
    """A state that AdamW has not, and none at all."""
    texts = ["dp4,zero1", "dp2,pp2,zero3,keep", "dp2,tp2"]
    check_exchanged(ranks(exchanged, texts, chained(texts), tmp_path, {"optimizer": optimizer}))
    names = ranks(names_saved, tmp_path / texts[0], 1)[0]
    assert {name.partition("/")[2] for name in names if "/" in name} == states


def test_a_checkpoint_from_before_the_first_step(ranks, tmp_path):
    """There are no states in it, and none are left of a model that has been trained."""
    texts = ["dp4,zero2", "pp2,tp2", "dp4,zero3"]
    check_exchanged(ranks(exchanged, texts, chained(texts), tmp_path, {}, steps=0))


def loaded(text: str, root, step: int) -> dict[str, torch.Tensor]:
    """On a rank: everything, of a checkpoint that others have written; a step afterwards goes well."""
    parallel = parallel_of(text, seed=1)
    load(parallel, root / f"step-{step:09d}")
    found = whole(parallel)
    assert stepped(parallel, step, 8) > 0
    return found


def saved_by(text: str, root) -> dict[str, torch.Tensor]:
    """On a rank: everything, as it was saved after 2 steps."""
    parallel = parallel_of(text)
    for step in range(2):
        stepped(parallel, step)
    root.mkdir(exist_ok=True)
    save(parallel, root, 2)
    return whole(parallel)


def test_from_four_ranks_to_two(ranks, two, tmp_path):
    """To eight and back: test_eight_ranks."""
    expected = ranks(saved_by, "dp2,tp2,sp,zero2", tmp_path)[0]
    assert all(not unequal(found, expected) for found in two(loaded, "dp2,zero3", tmp_path, 2))


def saved_in_one_group(text: str, root) -> dict[str, torch.Tensor]:
    """As `saved_by`, of an optimizer whose parameters are all in one group."""
    with mock.patch.object(model, "decay_groups", lambda module: [{"params": list(module.parameters())}]):
        return saved_by(text, root)


@pytest.mark.parametrize("text, other", [("dp4,zero1", "dp2,tp2,zero3"), ("dp2,tp2,zero3", "dp2,pp2,zero2")])
def test_a_checkpoint_of_one_parameter_group(ranks, tmp_path, text, other):
    """Runs had one before norms and biases had a group of their own. States are saved by their weights' names."""
    expected = ranks(saved_in_one_group, text, tmp_path / "one")[0]
    assert all(not unequal(found, expected) for found in ranks(loaded, other, tmp_path / "one", 2))


def add_spare(stage: nn.Module) -> None:
    """Two matrices that no forward uses, the first and the last of a block."""
    block = stage.blocks[0]
    block.spare = nn.Parameter(torch.empty(5, 7, device="meta"))
    block._parameters = {"first": nn.Parameter(torch.empty(3, 7, device="meta")), **block._parameters}


def spared(texts: list[str], root) -> list[str]:
    """On a rank: what each layout makes different of another's checkpoint of a model that does not use all weights."""
    wrong, config = [], ModelConfig(**SIZES)
    for source, target in chained(texts):
        saving, loading = (
            parallelize(config, layout, build_mesh(layout), extra=[add_spare], seed=seed, lr=1e-3)
            for seed, layout in enumerate(map(Layout.parse, (source, target)))
        )
        stepped(saving, 0)
        folder = root / f"{source} to {target}"
        folder.mkdir(exist_ok=True)
        save(saving, folder, 1)
        load(loading, folder / "step-000000001")
        found, wanted = whole(loading), whole(saving)
        for name in found.keys() | wanted.keys():
            if name in wanted:
                same = name in found and torch.equal(found[name], wanted[name])
            else:
                same = "/step" in name or "/exp_avg" in name and not found[name].any()  # a bucket's count, and zeros
            wrong += [f"{source} to {target}: {name}"] * (not same)
    return wrong


def test_weights_without_states(ranks, tmp_path):
    """Those that no rank has used have none yet, or zeros where they share a bucket of ZeRO with others."""
    assert ranks(spared, ["dp4", "dp2,tp2,zero1", "dp2,tp2,zero3", "dp4,zero2"], tmp_path) == [[]] * 4


# Who writes what, and when.


def shares(text: str, root) -> tuple[dict, bool, dict]:
    """On a rank: bytes of each chunk that it writes; whether the next copy lies where it was; bytes of the whole."""
    parallel = parallel_of(text, optimizer="momentum")
    checkpoints = Checkpoints(parallel, root)
    before = {(name, chunk.offsets) for name, chunks in checkpoints.stage().items() for chunk in chunks}
    stepped(parallel, 0)
    places = []
    for step in (1, 2):
        staged = checkpoints.stage()
        places.append({(n, chunk.offsets): chunk.values.data_ptr() for n, chunks in staged.items() for chunk in chunks})
        stepped(parallel, step)
    own = {(name, chunk.offsets): chunk.values.nbytes for name, chunks in staged.items() for chunk in chunks}
    assert before == {key for key in before if "/" not in key[0]}
    return own, places[0] == places[1], {name: each.nbytes for name, each in whole(parallel).items()}


@pytest.mark.parametrize("text", ["dp4", "dp2,tp2,zero1", "tp4", "dp4,zero3", "dp4,zero3,rep2", "cp2,pp2"])
def test_each_chunk_is_copied_once_and_write_assignments_are_even(ranks, tmp_path, text):
    """The job's copies are as large as the model and its states. What several ranks have is shared out: their shares
    differ by no more than the largest tensor. A later save takes the same memory.
    """
    of_ranks = ranks(shares, text, tmp_path)
    sizes = of_ranks[0][2]
    written = [key for own, _, _ in of_ranks for key in own]
    assert len(written) == len(set(written)) and all(same for _, same, _ in of_ranks)
    for name, nbytes in sizes.items():
        assert sum(own.get(key, 0) for own, _, _ in of_ranks for key in own if key[0] == name) == nbytes, name
    each = [sum(own.values()) for own, _, _ in of_ranks]
    assert max(each) - min(each) <= max(sizes.values()), each
    if text == "dp4":
        assert max(each) < 1.1 * min(each), each


def changed_at_once(root) -> list[str]:
    """On a rank: what another model has not as it was when it was saved, though training went on beside the save."""
    parallel = parallel_of("dp2,tp2,sp,zero1")
    checkpoints = Checkpoints(parallel, root)
    stepped(parallel, 0)
    expected, wrong = whole(parallel), []
    for step in (1, 2):
        checkpoints.save(step, {"position": 8 * step})
        stepped(parallel, step)
        checkpoints.wait()
        assert checkpoints.failure is None
        again = parallel_of("dp4,zero3", seed=1)
        load(again, root / f"step-{step:09d}")
        wrong += unequal(whole(again), expected)
        expected = whole(parallel)
    return wrong


def test_training_goes_on_beside_a_save_and_changes_nothing_in_it(ranks, tmp_path):
    assert ranks(changed_at_once, tmp_path) == [[]] * 4


# What can't be loaded.


def told(run) -> str:
    """As said, of whatever is raised."""
    try:
        run()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def content(folder) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def refused(folders: list) -> list[tuple[str, bool, bool]]:
    """On a rank, of each folder: what loading it raises, whether weights and states are as before, and the files. A
    step goes well after each.
    """
    parallel, found = parallel_of("dp4"), []
    for step, folder in enumerate(folders):
        stepped(parallel, step)
        before, files = whole(parallel), content(folder)
        message = told(lambda: load(parallel, folder))
        dist.barrier()
        found.append((message, not own_unequal(parallel, before), content(folder) == files))
    assert stepped(parallel, len(folders)) > 0
    return found


class Planted:
    """Its pickle makes a folder."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def rewritten(folder, **about) -> None:
    """Change checkpoint.json; files: those of the folder, with their sums as they are now."""
    files = {file.name: digest(file) for file in folder.iterdir() if file.name != ABOUT}
    said_now = json.loads((folder / ABOUT).read_text())
    del said_now["sum"]
    text = sealed(said_now | {"files": files} | about)
    (folder / ABOUT).write_text(text if "version" not in about else text.replace('"version": 1', '"version": 2'))


def test_a_bad_checkpoint_is_one_line_on_all_ranks_and_changes_nothing(ranks, tmp_path):
    """What is damaged, of others, or could run code; what only the reader finds; another model."""
    ranks(saved_by, "dp4", tmp_path / "good")
    good, cases = tmp_path / "good" / "step-000000002", {}

    def copied(name: str, message: str):
        cases[tmp_path / name] = message
        return shutil.copytree(good, tmp_path / name)

    file = copied("short", "is damaged: __2_0.distcp: 1,000 of ") / "__2_0.distcp"
    file.write_bytes(file.read_bytes()[:1000])
    file = copied("flipped", "is damaged: __3_0.distcp: other bytes than written") / "__3_0.distcp"
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    (copied("removed", "is damaged: __1_0.distcp: No such file or directory") / "__1_0.distcp").unlink()
    (copied("foreign", "is not a checkpoint of this course: it has no checkpoint.json") / ABOUT).unlink()
    rewritten(copied("newer", "has format 2, this program reads 1"), version=2)
    copied("open", "anyone may write to it").chmod(0o777)
    metadata = ChunkReader(good).read_metadata()
    metadata.planner_data = Planted(tmp_path / "planted ran")
    folder = copied("planted", ".metadata can't be read: it names posix.mkdir, which no checkpoint needs")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    rewritten(folder)
    folder = copied("not listed", "__1_0.distcp")  # nobody misses it before it is read
    (folder / "__1_0.distcp").unlink()
    rewritten(folder)
    folder = copied("no list", "")
    (folder / ABOUT).write_text((folder / ABOUT).read_text().replace('"files"', '"filez"'))
    file = copied("another position", "checkpoint.json is damaged: its checksum does not match") / ABOUT
    file.write_text(file.read_text().replace('"step": 2', '"step": 3'))
    cases[tmp_path / "nowhere"] = "nowhere: no such folder"
    for name, sizes, message in (
        ("wider", {"ffn_hidden": 48}, "another model: ffn_hidden is "),
        ("deeper", {"layers": 3}, "another model: layers is "),
        ("shallower", {"layers": 1}, "another model: layers is "),
        ("untied", {"tied": False}, "another model: tied is "),
    ):
        ranks(saved_sizes, tmp_path / name, sizes)
        cases[tmp_path / name / "step-000000000"] = message
    of_ranks, wrong = ranks(refused, list(cases)), []
    for (path, expected), *found in zip(cases.items(), *of_ranks, strict=True):
        messages = {message for message, _, _ in found}
        fits = len(messages) == 1 and all(m.startswith(KINDS) and expected in m for m in messages)
        fits = fits and all("\n" not in message for message in messages)
        wrong += [] if fits else [(path.name, messages)]
        assert all(same and kept for _, same, kept in found), path
    assert not wrong and not (tmp_path / "planted ran").exists(), wrong


def saved_sizes(root, sizes: dict) -> None:
    root.mkdir(exist_ok=True)
    save(parallel_of("dp4", **sizes), root, 0)


# What can't be saved.


def begin_trouble(kind: str, root) -> None:
    """On a rank: from now on saving to `root` fails; rank 0 writes the folder, rank 1 has a file of its own."""
    first = dist.get_rank() == 0
    if kind == "full disk" and dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    if kind == "no folder" and first:
        root.rename(root.with_name("away"))
    if kind == "a file instead" and first:
        (root / "step-000000002.saving").write_text("a file")
    if kind == "read-only" and first:
        root.chmod(0o555)
        if os.getuid() == 0:  # who may write to what is read-only
            os.seteuid(65534)
    dist.barrier()


def end_trouble(kind: str, root) -> None:
    dist.barrier()
    first = dist.get_rank() == 0
    if kind == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)
    if kind == "no folder" and first:
        root.with_name("away").rename(root)
    if kind == "a file instead" and first:
        (root / "step-000000002.saving").unlink()
    if kind == "read-only" and first:
        os.seteuid(os.getuid())
        root.chmod(0o755)
    dist.barrier()


def saves_in_trouble(kind: str, root) -> dict:
    """On a rank: three saves, of which the second fails; what is said of it, and what is left."""
    parallel, lines = parallel_of("dp2,tp2,sp,zero1"), []
    checkpoints = Checkpoints(parallel, root, report=lines.append)
    stepped(parallel, 0)
    checkpoints.save(1)
    checkpoints.wait()
    found, good = {"first": checkpoints.failure}, whole(parallel)
    stepped(parallel, 1)
    begin_trouble(kind, root)
    try:
        checkpoints.save(2)
        found["loss"] = stepped(parallel, 2)
        checkpoints.wait()
    finally:
        end_trouble(kind, root)
    found |= {"failure": checkpoints.failure, "lines": list(lines), "left": sorted(p.name for p in root.iterdir())}
    load(parallel, root / "step-000000001")
    found["good"] = not unequal(whole(parallel), good)
    checkpoints.save(3)
    checkpoints.wait()
    return found | {"third": checkpoints.failure, "all lines": lines, "names": sorted(p.name for p in root.iterdir())}


KINDS = ("CheckpointError: ", "DamagedError: ")
TROUBLES = {
    "full disk": "OSError: [Errno 27] File too large",
    "no folder": "there is no folder ",
    "a file instead": "FileExistsError: ",
    "read-only": "PermissionError: ",
}


@pytest.mark.parametrize("kind", TROUBLES)
def test_a_save_that_fails_is_a_line_and_training_goes_on(ranks, kind):
    """One line, on rank 0, of the step, what went wrong, the last good one; all ranks know; the next save is good."""
    with tempfile.TemporaryDirectory() as above:  # others may look into it
        os.chmod(above, 0o755)
        root = Path(above) / "checkpoints"
        root.mkdir()
        of_ranks = ranks(saves_in_trouble, kind, root)
    for rank, found in enumerate(of_ranks):
        assert found["first"] is None and found["third"] is None and found["loss"] > 0 and found["good"]
        assert found["failure"] and TROUBLES[kind] in found["failure"] and "\n" not in found["failure"], found
        assert found["failure"] == of_ranks[0]["failure"]
        last = "there is no earlier one" if kind == "no folder" else "the last good one is step-000000001"
        line = f"checkpoint of step 2 failed: {found['failure']}; {last}"
        assert found["lines"] == found["all lines"] == ([line] if rank == 0 else [])
        assert found["left"] == ["step-000000001"] and found["names"] == ["step-000000001", "step-000000003"]


def loses_a_rank(root) -> tuple[str, str | None]:
    """On a rank: what the wait for a save raises, of which rank 0 has lost the others."""
    checkpoints, whole_gather = Checkpoints(parallel_of("dp2"), root), dist.all_gather_object

    def gather(*args, **kwargs):
        if threading.current_thread() is checkpoints.thread and dist.get_rank() == 0:
            raise RuntimeError("Connection reset by peer")
        whole_gather(*args, **kwargs)

    with mock.patch.object(dist, "all_gather_object", gather):
        checkpoints.save(1)
        with pytest.raises(RuntimeError) as raised:
            checkpoints.wait()
    return str(raised.value), checkpoints.failure


def test_a_rank_that_lost_the_others_in_a_save_does_not_go_on(two, tmp_path):
    """Or it would wait in a step for one that waits for it in the save. The other learns of it, as a lost peer."""
    (first, none), (second, nothing) = two(loses_a_rank, tmp_path)
    assert first == "Connection reset by peer" and LOST_PEER.search(second) and none is nothing is None
