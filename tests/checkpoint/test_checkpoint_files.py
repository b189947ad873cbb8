"""course_lib.checkpoint.files: killed at each operation on files, strangers' files, damage. No ranks, any machine."""

import io
import json
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from calls import said
from course_lib.checkpoint.chunks import Chunk
from course_lib.checkpoint.files import (
    ABOUT,
    DELETING,
    FORMAT,
    SAVING,
    VERSION,
    CheckpointError,
    ChunkReader,
    MetadataUnpickler,
    begin,
    check_trusted,
    check_written,
    commit,
    complete,
    damaged,
    describe,
    digest,
    latest,
)
from course_lib.checkpoint.planners import ChunkLoadPlanner, ChunkSavePlanner

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def saved(root: Path, step: int, keep: int = 2) -> Path:
    """A complete checkpoint of one tensor, which is the step."""
    saving = begin(root, step)
    value = torch.full((3, 4), float(step))
    chunks = {"weight": [Chunk((0, 0), (3, 4), value)]}
    writer = dcp.FileSystemWriter(saving, overwrite=False)
    dcp.save(chunks, storage_writer=writer, planner=ChunkSavePlanner(), no_dist=True)
    files = {name: digest(saving / name) for name in ("__0_0.distcp", ".metadata")}
    return commit(saving, {"step": step, "files": files}, keep)


def value_of(folder: Path) -> float:
    """The tensor of a checkpoint, after all that is looked at before it is read."""
    about = describe(folder)
    assert damaged(folder, about["files"]) is None
    found = torch.full((3, 4), torch.nan)
    chunks = {"weight": [Chunk((0, 0), (3, 4), found)]}
    dcp.load(chunks, storage_reader=ChunkReader(folder), planner=ChunkLoadPlanner(), no_dist=True)
    assert found.unique().tolist() == [about["step"]]
    return about["step"]


# Complete, or not there.


def test_the_last_complete_checkpoint_is_found_by_its_number(tmp_path):
    """In the order of steps, not of names; other names, files, and folders on their way in or out do not count."""
    assert complete(tmp_path) == {} and latest(tmp_path) is None and latest(tmp_path / "nowhere") is None
    names = ["step-000000009", "step-1000000000", "step-000000100", "step-20"]
    for name in [*names, "step-999999999.saving", "step-999999998.deleting", "step-", "step-9x", "step--9", "other-7"]:
        (tmp_path / name).mkdir()
    (tmp_path / "step-77").write_text("a file")
    assert list(complete(tmp_path)) == [9, 20, 100, 1000000000]
    assert latest(tmp_path) == tmp_path / "step-1000000000" == list(complete(tmp_path).values())[-1]


def test_begin_removes_what_killed_jobs_have_left(tmp_path):
    kept = saved(tmp_path, 10)
    for left in (f"step-000000020{SAVING}", f"step-000000005{DELETING}", f"step-000000030{SAVING}"):
        (tmp_path / left / "inside").mkdir(parents=True)
        (tmp_path / left / "inside" / "file").write_text("half of it")
    folder = begin(tmp_path, 30)
    assert folder.is_dir() and not list(folder.iterdir())
    assert sorted(tmp_path.iterdir()) == [kept, folder]
    with pytest.raises(CheckpointError, match=f"there is no folder {tmp_path / 'nowhere'} to save checkpoints in"):
        begin(tmp_path / "nowhere", 1)


def test_begin_removes_a_link_and_leaves_what_it_leads_to(tmp_path):
    elsewhere = tmp_path / "another disk"
    elsewhere.mkdir()
    (tmp_path / f"step-000000005{DELETING}").symlink_to(elsewhere)
    folder = begin(tmp_path, 30)
    assert sorted(tmp_path.iterdir()) == [elsewhere, folder]


def test_nothing_is_saved_where_nothing_would_be_loaded(tmp_path):
    root = tmp_path / "open"
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(CheckpointError, match=f"^{root}: anyone may write to it, so no checkpoint in it could be "):
        begin(root, 1)
    assert not list(root.iterdir())
    root.chmod(0o1777)  # as /tmp
    check_trusted(saved(root, 1))


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_commit_keeps_the_last_ones(tmp_path, keep):
    for step in range(10, 60, 10):
        folder = saved(tmp_path, step, keep)
        assert folder == latest(tmp_path) and value_of(folder) == step
        expected = list(range(10, step + 10, 10))[-keep:]
        assert list(complete(tmp_path)) == expected and len(list(tmp_path.iterdir())) == len(expected)
    about = json.loads((folder / ABOUT).read_text())
    assert (about["format"], about["version"], about["step"]) == (FORMAT, VERSION, 50)


def test_a_step_that_is_there_is_left_alone(tmp_path):
    saved(tmp_path, 10), saved(tmp_path, 20)
    with pytest.raises(CheckpointError, match="step-000000020 exists already$"):
        begin(tmp_path, 20)
    assert (
        list(complete(tmp_path)) == [10, 20] and value_of(latest(tmp_path)) == 20 and len(list(tmp_path.iterdir())) == 2
    )


@pytest.mark.parametrize(("keep", "left"), [(1, [15]), (2, [15, 20]), (3, [10, 15, 20])])
def test_the_new_one_stays_where_newer_ones_are_there(tmp_path, keep, left):
    """Somebody has gone back to step 10, and saves step 15."""
    saved(tmp_path, 10), saved(tmp_path, 20)
    assert value_of(saved(tmp_path, 15, keep)) == 15 and list(complete(tmp_path)) == left


def test_no_checkpoint_of_files_that_are_elsewhere(tmp_path):
    """Ranks with a folder of their own each: what they have written is not in the one that is committed."""
    saving = begin(tmp_path, 10)
    (saving / "__0_0.distcp").write_text("four")
    check_written(saving, {"__0_0.distcp": [4, ""]})
    for files in ({"__1_0.distcp": [4, ""]}, {"__0_0.distcp": [5, ""]}):
        with pytest.raises(CheckpointError, match="all ranks must share one folder$"):
            check_written(saving, files)


def test_the_disk_has_everything_before_the_name_is_complete(tmp_path):
    """In the order of a commit: checkpoint.json is flushed, then the folder, then the rename, then the folder above."""
    first, saving = saved(tmp_path, 1), begin(tmp_path, 2)
    events = []
    with pytest.MonkeyPatch.context() as patched:
        fsync, rename = os.fsync, os.rename
        patched.setattr(os, "fsync", lambda file: (events.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
        patched.setattr(os, "rename", lambda a, b, **k: (events.append((str(a), str(b))), rename(a, b, **k)))
        commit(saving, {"step": 2}, keep=1)
    flushed_and_named = [str(saving / ABOUT), str(saving), (str(saving), str(saving.with_suffix(""))), str(tmp_path)]
    assert events == [*flushed_and_named, (str(first), str(first.with_suffix(DELETING)))]


# Killed in the middle.

KILLED = """
    import json, os, signal, sys
    from pathlib import Path
    from course_lib.checkpoint.files import begin, commit

    def saved(root, step, keep, time):
        saving = begin(root, step)
        for name in ("__0_0.distcp", ".metadata"):
            (saving / name).write_text(f"{name} of {step} for the {time} time")
        commit(saving, {"step": step}, keep)

    def watch(event, args):
        global left
        writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
        if writes or event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = lambda file: None  # the machine goes on running here
    for way, (keep, before, then) in enumerate(json.loads(sys.argv[2])):
        for kill_at in range(1, 1000):
            root = Path(sys.argv[1], str(way), str(kill_at))
            root.mkdir(parents=True)
            for step in before:
                saved(root, step, keep, "first")
            child = os.fork()  # of a process with one thread
            if child == 0:
                left = kill_at
                sys.addaudithook(watch)
                for step in then:
                    saved(root, step, keep, "second")
                os._exit(0)
            if os.waitpid(child, 0)[1] == 0:
                break
"""
WAYS = [(1, [10], [20]), (2, [10, 20], [30]), (1, [10, 20], [30, 40]), (2, [], [10, 20, 30])]


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """A folder for each of WAYS, in it a root for each operation at which a job was killed; the last job was not."""
    roots = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(roots), json.dumps(WAYS)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return roots


def read_small(folder: Path) -> tuple[int, set[str]]:
    """Of a checkpoint of KILLED: its step, and for which time each of its files was written. All of it is there."""
    step, names = describe(folder)["step"], ("__0_0.distcp", ".metadata")
    assert folder.name == f"step-{step:09d}" and {file.name for file in folder.iterdir()} == {*names, ABOUT}
    words = [(folder / name).read_text().split() for name in names]
    assert all((len(each), each[2], each[-1]) == (7, str(step), "time") for each in words)
    return step, {each[-2] for each in words}


@pytest.mark.parametrize("way", range(len(WAYS)), ids=str)
def test_killed_at_any_operation_a_complete_checkpoint_is_there(killed, way):
    """SIGKILL at the k-th file that is opened for writing, renamed or removed, or folder that is made or removed, for
    every k. What is complete is whole; the last one is never older than the last one before; the next save goes well.
    """
    (keep, before, then), lost = WAYS[way], []
    roots = sorted((killed / str(way)).iterdir(), key=lambda root: int(root.name))
    assert len(roots) > 6 * len(then)
    assert list(complete(roots[-1])) == sorted({*before, *then})[-keep:]
    for root in roots:
        names, steps = sorted(path.name for path in root.iterdir()), list(complete(root))
        for step, folder in complete(root).items():
            found, times = read_small(folder)
            assert found == step and len(times) == 1, (root, folder)
        if before and (not steps or steps[-1] < before[-1]):
            lost.append((int(root.name), names))
        assert commit(begin(root, 50), {"step": 50}, keep) == latest(root)
        assert all(folder.suffix == "" for folder in root.iterdir())
        assert list(complete(root)) == [*steps, 50][-keep:]
    assert not lost, lost


# Whom to trust.


def test_what_others_could_have_written_is_not_trusted(tmp_path):
    """The folder above, the folder, or any file in it: writable for anyone. In a folder that others can't enter, the
    files may be: an umask of 0 makes such ones.
    """
    folder = saved(tmp_path, 1)
    (folder / ABOUT).chmod(0o666)
    assert folder.stat().st_mode & 0o777 == 0o750
    check_trusted(folder)
    (folder / ABOUT).chmod(0o644)
    folder.chmod(0o755)
    for path in (tmp_path, folder, *sorted(folder.iterdir())):
        mode = path.stat().st_mode
        path.chmod(mode | 0o002)
        for look in (check_trusted, describe):
            with pytest.raises(
                CheckpointError, match=f"^{path}: anyone may write to it, and it may run code: "
            ) as error:
                look(folder)
            assert "\n" not in str(error.value)
        path.chmod(mode)
        check_trusted(folder)


def test_what_belongs_to_another_user_is_not_trusted(tmp_path, monkeypatch):
    """What belongs to root is: who is root can write anywhere. Another user here is one whose number nobody has."""
    folder = saved(tmp_path, 1)
    if os.getuid() == 0:
        for path in (folder, folder / "__0_0.distcp", folder / ".metadata", folder / ABOUT):
            os.chown(path, 12345, -1)
            with pytest.raises(CheckpointError, match=f"^{path}: it belongs to user 12345, and it may run code: "):
                check_trusted(folder)
            os.chown(path, 0, -1)
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        check_trusted(folder)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        with pytest.raises(CheckpointError, match=f"^{folder}: it belongs to user "):
            check_trusted(folder)


# What describe says.


def test_describe_returns_what_commit_was_told(tmp_path):
    assert describe(saved(tmp_path, 7)).items() >= {"step": 7, "format": FORMAT, "version": VERSION}.items()


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "{folder} is not a checkpoint of this course: it has no checkpoint.json"),
        ("{", "{folder}/checkpoint.json is damaged: Expecting "),
        ("", "{folder}/checkpoint.json is damaged: Expecting value"),
        ('{"format": "course_lib che', "{folder}/checkpoint.json is damaged: Unterminated string"),
        (b"\xff\xfe\x00", "{folder}/checkpoint.json is damaged: 'utf-8' codec can't decode"),
        ("[1, 2]", "{folder} is not a checkpoint of this course: checkpoint.json has no 'course_lib checkpoint'"),
        ("null", "{folder} is not a checkpoint of this course: checkpoint.json has no"),
        ('{"format": "another", "version": 1}', "{folder} is not a checkpoint of this course: checkpoint.json has no "),
        ('{"format": "course_lib checkpoint", "version": 2}', "{folder} has format 2, this program reads 1"),
        ('{"format": "course_lib checkpoint"}', "{folder} has format None, this program reads 1"),
    ],
)
def test_describe_says_in_a_line_what_is_wrong(tmp_path, text, message):
    folder = tmp_path / "step-000000001"
    folder.mkdir()
    if text is not None:
        (folder / ABOUT).write_bytes(text if isinstance(text, bytes) else text.encode())
    error = said(lambda: describe(folder))
    kind = "DamagedError" if "is damaged" in message else "CheckpointError"
    assert error.startswith(f"{kind}: " + message.replace("{folder}", str(folder))) and "\n" not in error


def test_describe_helps_where_the_folder_of_a_run_is_given(tmp_path):
    assert (
        said(lambda: describe(latest(tmp_path)))
        == "CheckpointError: there is no checkpoint: latest found no complete one"
    )
    last = saved(tmp_path, 7)
    assert said(lambda: describe(tmp_path)).endswith(f"it has no checkpoint.json; the last one in it is {last}")


def test_describe_of_what_is_no_folder_or_can_not_be_read(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "nowhere", tmp_path / "file"):
        assert said(lambda: describe(path)) == f"CheckpointError: {path}: no such folder"
    folder = tmp_path / "step-000000001"
    (folder / ABOUT).mkdir(parents=True)
    assert said(lambda: describe(folder)) == f"CheckpointError: {folder}: Is a directory"


# Damage.


def test_each_kind_of_damage_is_found_and_named(tmp_path):
    folder = saved(tmp_path, 1)
    files = describe(folder)["files"]
    assert set(files) == {"__0_0.distcp", ".metadata"} and damaged(folder, files) is None
    for name, (size, _) in files.items():
        file, whole = folder / name, (folder / name).read_bytes()
        assert len(whole) == size
        for length in (0, 1, size // 2, size - 1):
            file.write_bytes(whole[:length])
            assert damaged(folder, files) == f"{name}: {length:,} of {size:,} bytes"
        file.write_bytes(whole + b"x")
        assert damaged(folder, files) == f"{name}: {size + 1:,} of {size:,} bytes"
        for place in (0, size // 3, size - 1):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            assert damaged(folder, files) == f"{name}: other bytes than written"
        file.unlink()
        assert damaged(folder, files) == f"{name}: No such file or directory"
        file.write_bytes(whole)
        assert damaged(folder, files) is None


# Pickles.


class Calls:
    """Its pickle calls something."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def named(module: str, name: str, protocol: int) -> bytes:
    """A pickle that names something: by GLOBAL, or by STACK_GLOBAL, where dots may lead to what is inside of it."""
    if protocol < 4:
        return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"."
    words = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
    return b"\x80\x04" + words + b"\x93."


FORBIDDEN = [
    ("builtins", "eval"),
    ("posix", "system"),
    ("os", "system"),
    ("torch", "load"),
    ("torch", "Size.__init__.__globals__"),
    ("torch", "serialization.load"),
    ("torch.serialization", "load"),
    ("torch.serialization", "_get_layout.__globals__"),
    ("torch.serialization", "os.system"),
    ("torch.distributed.checkpoint.metadata", "os.system"),
    ("torch.distributed.checkpoint.metadata", "Metadata.__init__"),
    ("torch.distributed.checkpoint.filesystem", "os.system"),
    ("pathlib", "os.system"),
    ("pathlib", "Path.write_text"),
    ("pathlib", "PosixPath.unlink"),
    ("pathlib", "os"),
]


@pytest.mark.parametrize("module, name", FORBIDDEN)
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickle_may_not_name_what_no_checkpoint_needs(tmp_path, module, name, protocol):
    (tmp_path / ".metadata").write_bytes(named(module, name, protocol))
    with (
        open(tmp_path / ".metadata", "rb") as file,
        pytest.raises(pickle.UnpicklingError, match="which no checkpoint needs"),
    ):
        MetadataUnpickler(file).load()
    error = said(ChunkReader(tmp_path).read_metadata)
    assert error == (
        f"CheckpointError: {tmp_path}/.metadata can't be read: it names {module}.{name}, which no checkpoint needs"
    )


def test_a_getattr_reaches_members_of_enums_alone():
    """Python 3.11.0 to 3.11.3 pickles a member so; with anything else it would be a way to whatever is named."""
    member = _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST
    pickled = pickle.dumps(Calls(getattr, _MEM_FORMAT_ENCODING, member.name))
    assert MetadataUnpickler(io.BytesIO(pickled)).load() is member
    for planted in (Calls(getattr, Metadata, "__init__"), Calls(getattr, _MEM_FORMAT_ENCODING, "__init__")):
        with pytest.raises((AttributeError, KeyError)):
            MetadataUnpickler(io.BytesIO(pickle.dumps(planted))).load()


def test_a_planted_call_is_not_made(tmp_path):
    """Whatever the protocol, at the top and inside of real metadata."""
    folder, touched = saved(tmp_path, 1), tmp_path / "touched"
    metadata = ChunkReader(folder).read_metadata()
    for planted in (Calls(os.mkdir, str(touched)), Calls(eval, f"open({str(touched)!r}, 'w')")):
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            metadata.planner_data = planted
            for what in (planted, [planted], metadata):
                (folder / ".metadata").write_bytes(pickle.dumps(what, protocol))
                error = said(ChunkReader(folder).read_metadata)
                assert error.startswith("CheckpointError: ") and "which no checkpoint needs" in error, (protocol, error)
                assert not touched.exists()


def test_damaged_metadata_is_a_checkpoint_error(tmp_path):
    """Cut short at any length: whatever the pickle module raises, it is one line of ours."""
    folder = saved(tmp_path, 1)
    whole = (folder / ".metadata").read_bytes()
    for length in range(0, len(whole), 7):
        (folder / ".metadata").write_bytes(whole[:length])
        assert said(ChunkReader(folder).read_metadata).startswith(
            f"CheckpointError: {folder}/.metadata can't be read: "
        )
    (folder / ".metadata").unlink()
    assert "No such file" in said(ChunkReader(folder).read_metadata)


@pytest.mark.parametrize("content", [None, {"a": 1}, [torch.Size([2])], Metadata({})])
def test_a_pickle_of_something_else_is_a_checkpoint_error(tmp_path, content):
    """Nothing forbidden is in it, and yet it says nothing of chunks and files."""
    (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
    assert said(ChunkReader(tmp_path).read_metadata).startswith(
        f"CheckpointError: {tmp_path}/.metadata can't be read: "
    )


def test_real_metadata_of_each_dtype_is_read(tmp_path):
    """What torch.distributed.checkpoint has written, of its own tensors and of our chunks."""
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool]
    state = {str(dtype): torch.ones(2, 3, dtype=dtype) for dtype in dtypes} | {"scalar": torch.tensor(3.0)}
    dcp.save(state, checkpoint_id=tmp_path / "plain", no_dist=True)
    chunks = {name: [Chunk((0,) * each.dim(), tuple(each.shape), each)] for name, each in state.items()}
    dcp.save(chunks, checkpoint_id=tmp_path / "chunks", planner=ChunkSavePlanner(), no_dist=True)
    for kind in ("plain", "chunks"):
        found = ChunkReader(tmp_path / kind).read_metadata().state_dict_metadata
        assert {name: (tuple(each.size), each.properties.dtype) for name, each in found.items()} == {
            name: (tuple(each.shape), each.dtype) for name, each in state.items()
        }


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_metadata_of_each_python_is_read(tmp_path, monkeypatch, module):
    """Paths are of pathlib in pickles of Python 3.11 and 3.12, of pathlib._local in those of 3.13."""
    folder = saved(tmp_path, 5)
    metadata = ChunkReader(folder).read_metadata()
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, module, pathlib)
        patched.setattr(type(folder), "__module__", module)
        written = pickle.dumps(metadata)
    assert module.encode() in written
    (folder / ".metadata").write_bytes(written)
    found = ChunkReader(folder).read_metadata()
    assert found.state_dict_metadata == metadata.state_dict_metadata and found.storage_data == metadata.storage_data


def test_values_are_read_without_pickles_that_run_code(tmp_path):
    """A chunk's bytes are a zip with a pickle of torch.save's in it: one that calls something is refused too."""
    folder, touched = saved(tmp_path, 1), tmp_path / "touched"
    torch.save(Calls(os.mkdir, str(touched)), tmp_path / "planted")
    metadata = ChunkReader(folder).read_metadata()
    shutil.copy(tmp_path / "planted", folder / "__0_0.distcp")
    assert zipfile.is_zipfile(folder / "__0_0.distcp")
    place = next(iter(metadata.storage_data.values()))
    place.length = (folder / "__0_0.distcp").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    chunks = {"weight": [Chunk((0, 0), (3, 4), torch.zeros(3, 4))]}
    with pytest.raises(dcp.CheckpointException, match="Weights only load failed"):  # no Exception: a BaseException
        dcp.load(chunks, storage_reader=ChunkReader(folder), planner=ChunkLoadPlanner(), no_dist=True)
    assert not touched.exists()
