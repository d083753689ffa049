"""Folders that are complete or absent: staged folders, manifests, replacing, rotating, recovery from killed runs."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from outsize.base.errors import BadFile, SaveFailed
from outsize.checkpoint.folder import (
    MANIFEST,
    StagedDir,
    checkpoints,
    newest,
    os_errors_as_save_failed,
    read_manifest,
    recover_partial_saves,
    rotate,
)


def publish(place: Path, text: str = "x", *, replace: bool = False, **facts: Any) -> Path:
    staged = StagedDir.of(place, replace=replace)
    (staged.path / "weights").write_text(text)
    staged.publish(facts)
    return place


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def staged_names(folder: Path) -> list[str]:
    return [name for name in names(folder) if name.startswith(".partial-")]


# --- one folder


def test_nothing_is_there_until_it_is_published_and_then_all_of_it(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "down" / "checkpoint-1"
    staged = StagedDir.of(place)
    (staged.path / "sub").mkdir()
    (staged.path / "sub" / "b").write_text("four")
    (staged.path / "a").write_text("")
    assert not place.exists() and newest(place.parent) is None
    staged.publish({"steps": 3})
    assert names(place.parent) == ["checkpoint-1"] and newest(place.parent) == place
    facts = read_manifest(place)
    assert facts["files"] == {"a": 0, "sub/b": 4} and facts["steps"] == 3


def test_a_discarded_staged_folder_leaves_nothing(tmp_path: Path) -> None:
    staged = StagedDir.of(tmp_path / "a")
    (staged.path / "weights").write_text("x")
    staged.discard()
    staged.discard()
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "name",
    [
        "a b",
        "größe 数",
        "line\nbreak",
        "x-old",
        ".hidden",
        "a@b-1-2-3",
        ".partial-x@y-1-2-3-old",
        "100%s {}",
        "\udcff",
        "-rf",
        "a'\"b",
    ],
)
def test_a_place_may_have_any_name(tmp_path: Path, name: str) -> None:
    place = publish(tmp_path / name, "old")
    publish(place, "new", replace=True)
    staged = StagedDir.of(tmp_path / f"{name}2")
    (staged.path / name).write_text("abc")
    staged.publish({})
    assert names(tmp_path) == sorted([name, f"{name}2"]) and (place / "weights").read_text() == "new"
    assert read_manifest(tmp_path / f"{name}2")["files"] == {name: 3}


def test_a_relative_place_means_the_folder_it_meant_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    staged = StagedDir.of(Path("checkpoint-1"))
    monkeypatch.chdir("elsewhere")
    staged.publish({})
    assert names(tmp_path) == ["checkpoint-1", "elsewhere"] and names(tmp_path / "elsewhere") == []


def test_links_are_followed_and_stay(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk")
    publish(tmp_path / "out" / "checkpoint-1")
    (tmp_path / "latest").symlink_to("disk/checkpoint-1")
    publish(tmp_path / "latest", "new", replace=True)
    assert (tmp_path / "latest").is_symlink() and (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk" / "checkpoint-1" / "weights").read_text() == "new" and names(tmp_path / "disk") == [
        "checkpoint-1"
    ]


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_modes_are_what_the_umask_leaves(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        place = publish(tmp_path / "checkpoint-1")
    finally:
        os.umask(before)
    assert place.stat().st_mode & 0o777 == 0o777 & ~mask and (place / MANIFEST).stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_file_that_takes_the_manifests_name_is_refused(tmp_path: Path) -> None:
    staged = StagedDir.of(tmp_path / "a")
    (staged.path / MANIFEST).write_text("mine")
    with pytest.raises(SaveFailed, match=MANIFEST):
        staged.publish({})


# --- a place that is taken


def test_a_checkpoint_is_not_written_over_by_default(tmp_path: Path) -> None:
    place = publish(tmp_path / "a", "old")
    with pytest.raises(SaveFailed, match=rf"{place} exists already"):
        StagedDir.of(place)
    assert names(tmp_path) == ["a"] and (place / "weights").read_text() == "old"
    publish(place, "new", replace=True)
    assert names(tmp_path) == ["a"] and (place / "weights").read_text() == "new"


def test_what_takes_the_place_meanwhile_is_not_written_over(tmp_path: Path) -> None:
    staged = StagedDir.of(tmp_path / "a")
    (tmp_path / "a").mkdir()
    with pytest.raises(SaveFailed, match="exists already"):
        staged.publish({})
    assert names(tmp_path / "a") == []


def test_only_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters").write_text("dear")
    (tmp_path / "file").write_text("dear")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("home", "file", "dangling"):
        with pytest.raises(SaveFailed, match="cannot be replaced"):
            StagedDir.of(tmp_path / name, replace=True)
    assert names(tmp_path) == ["dangling", "file", "home"] and (tmp_path / "home" / "letters").exists()
    for name in (
        "checkpoint-7",
        "empty",
    ):  # one that another trainer left without a manifest, and one that holds nothing
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-7" / "model.safetensors").touch()
    for name in ("checkpoint-7", "empty"):
        assert names(publish(tmp_path / name, replace=True)) == [MANIFEST, "weights"]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), KeyboardInterrupt()])
@pytest.mark.parametrize("when", [1, 2])
def test_a_replacing_that_breaks_off_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, when: int
) -> None:
    """`when`: before the old one is renamed, or after that and before the new one is."""
    place = publish(tmp_path / "a", "old")
    staged = StagedDir.of(place, replace=True)
    (staged.path / "weights").write_text("new")
    rename, count = Path.rename, iter(range(1, 9))

    def fails(self: Path, target: Path) -> Path:
        if next(count) == when:
            raise error
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises((SaveFailed, KeyboardInterrupt)):
        staged.publish({})
    staged.discard()
    assert names(tmp_path) == ["a"] and (place / "weights").read_text() == "old" and read_manifest(place)


# --- errors


def test_places_that_cannot_be_written_are_reported_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (
        tmp_path / "file" / "a",
        tmp_path / "file" / "deep" / "a",
        Path("/proc/nothing/a"),
        tmp_path / ("n" * 250),
    ):
        with pytest.raises(SaveFailed, match=r"cannot be written: .*Earlier saves are unchanged"):
            StagedDir.of(place)
    assert names(tmp_path) == ["file"]


def test_a_disk_that_is_too_small_is_reported_before_anything_is_written(tmp_path: Path) -> None:
    staged = StagedDir.of(tmp_path / "a")
    staged.require_space(1)
    with pytest.raises(SaveFailed, match=r"needs 1048576 TiB of disk space, but .* is free"):
        staged.require_space(2**60)


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "f"), r"No space left on device \(f\)\. Free some space"),
        (OSError(errno.EFBIG, "File too large"), "Free some space"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "Free some space"),
        (PermissionError(errno.EACCES, "Permission denied", "f"), r"Permission denied \(f\)\. Name a folder"),
        (SafetensorError("I/O error: No space left"), "No space left"),
    ],
)
def test_errors_of_the_file_system_are_sentences(error: Exception, match: str) -> None:
    with pytest.raises(SaveFailed, match=match) as raised, os_errors_as_save_failed(Path("there")):
        raise error
    assert raised.value.__cause__ is error and "there cannot be written" in str(raised.value)


def test_what_is_reported_already_or_is_no_error_of_the_file_system_stays() -> None:
    for error in (SaveFailed("told"), ValueError("other"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as raised, os_errors_as_save_failed(Path("there")):
            raise error
        assert raised.value is error


# --- what is complete


def damage(folder: Path, how: str) -> None:
    manifest, weights = folder / MANIFEST, folder / "weights"
    match how:
        case "no manifest":
            manifest.unlink()
        case "half a manifest":
            manifest.write_text(manifest.read_text()[:20])
        case "no text":
            manifest.write_bytes(b"\xff\xfe")
        case "a list":
            manifest.write_text("[]")
        case "files that are a number":
            manifest.write_text(json.dumps({"format": 1, "files": 3}))
        case "another format":
            manifest.write_text(json.dumps({"format": 99, "files": {}}))
        case "a file is gone":
            weights.unlink()
        case "a file is shorter":
            weights.write_text("")
        case "a file is longer":
            weights.write_text("xx")
        case "a file is a folder":
            weights.unlink()
            weights.mkdir()


DAMAGES = {
    "no manifest": MANIFEST,
    "half a manifest": MANIFEST,
    "no text": MANIFEST,
    "a list": MANIFEST,
    "files that are a number": MANIFEST,
    "another format": "format",
    "a file is gone": "weights is missing",
    "a file is shorter": "weights has 0 bytes instead of 1",
    "a file is longer": "weights has 2 bytes instead of 1",
    "a file is a folder": "weights is missing",
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_folder_that_is_not_whole_is_refused_and_passed_over(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, damaged = publish(tmp_path / "checkpoint-1"), publish(tmp_path / "checkpoint-2")
    damage(damaged, how)
    with pytest.raises(BadFile, match=DAMAGES[how]):
        read_manifest(damaged)
    assert newest(tmp_path) == before and any(str(damaged) in text for text in caplog.messages)


def test_the_newest_is_the_one_of_most_steps(tmp_path: Path) -> None:
    assert newest(tmp_path) is None and newest(tmp_path / "missing") is None
    for step in (10, 9, 100, 2):
        publish(tmp_path / f"checkpoint-{step}")
    for name in ("checkpoint-", "checkpoint-1000-old", "checkpoint-1e9", "other-1000"):
        publish(tmp_path / name)
    (tmp_path / "checkpoint-1001").write_text("a file")
    assert [step for step, _ in checkpoints(tmp_path)] == [2, 9, 10, 100] and newest(
        tmp_path
    ) == tmp_path / "checkpoint-100"


# --- rotation


@pytest.mark.parametrize(
    ("limit", "keep", "left"),
    [
        (None, None, [1, 2, 3, 4, 5]),
        (0, None, [1, 2, 3, 4, 5]),
        (9, None, [1, 2, 3, 4, 5]),
        (1, None, [5]),
        (2, None, [4, 5]),
        (5, None, [1, 2, 3, 4, 5]),
        (1, 5, [5]),
        (2, 5, [4, 5]),
        (1, 2, [2, 5]),
        (2, 2, [2, 5]),
        (3, 2, [2, 4, 5]),
        (2, 9, [4, 5]),
    ],
)
def test_rotation_leaves_the_newest_and_the_one_to_keep(
    tmp_path: Path, limit: int | None, keep: int | None, left: list[int]
) -> None:
    for step in range(1, 6):
        publish(tmp_path / f"checkpoint-{step}")
    (tmp_path / "other").mkdir()
    rotate(tmp_path, limit, keep=None if keep is None else tmp_path / "other" / ".." / f"checkpoint-{keep}")
    assert names(tmp_path) == [*(f"checkpoint-{step}" for step in left), "other"]


def test_rotation_removes_links_and_not_what_they_lead_to(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    target = publish(tmp_path / "treasure")
    (tmp_path / "run" / "checkpoint-1").symlink_to(target)
    publish(tmp_path / "run" / "checkpoint-2")
    rotate(tmp_path / "run", 1)
    assert names(tmp_path / "run") == ["checkpoint-2"] and read_manifest(target)


def test_rotation_does_not_count_what_is_not_whole(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        publish(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-3" / MANIFEST).unlink()
    rotate(tmp_path, 1)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3"]


# --- runs that were killed


SCRIPT = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, "src")
from outsize.checkpoint.folder import StagedDir
place, what = Path(sys.argv[1]), sys.argv[2]
staged = StagedDir.of(place, replace=True)
(staged.path / "weights").write_text("new")
if what.startswith("rename"):
    rename, count = Path.rename, iter(range(9))
    def killed(self, target):
        if next(count) == int(what[-1]):
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)
    Path.rename = killed
    staged.publish({})
print("ready", flush=True)
sys.stdin.read()
"""


def start(place: Path, what: str) -> "subprocess.Popen[str]":
    run = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(place), what], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    assert (run.stdout.readline() == "ready\n") == (what == "staged")
    return run


def end(run: "subprocess.Popen[str]") -> None:
    run.kill()
    run.communicate()


@pytest.mark.parametrize("when", [0, 1])
def test_a_replacing_that_is_killed_leaves_one_whole_checkpoint(tmp_path: Path, when: int) -> None:
    """Killed at its first rename, the old one is there; at its second, neither is, and the new one is put into its
    place.
    """
    place = publish(tmp_path / "checkpoint-3", "old")
    end(start(place, f"rename {when}"))
    assert place.exists() == (when == 0) and len(staged_names(tmp_path)) == 1 + when
    assert newest(tmp_path) == place and (place / "weights").read_text() == ("old", "new")[when]
    assert names(tmp_path) == ["checkpoint-3"]


def test_if_the_new_one_is_not_whole_the_old_one_is_put_back(tmp_path: Path) -> None:
    """A disk that lost the last writes of a killed replacing."""
    place = publish(tmp_path / "checkpoint-3", "old")
    end(start(place, "rename 1"))
    fresh = next(tmp_path / name for name in staged_names(tmp_path) if not name.endswith("-old"))
    (fresh / "weights").write_text("")
    assert (
        newest(tmp_path) == place and (place / "weights").read_text() == "old" and names(tmp_path) == ["checkpoint-3"]
    )


def test_staged_folders_of_the_living_stay_and_those_of_the_dead_go(tmp_path: Path) -> None:
    mine = StagedDir.of(tmp_path / "checkpoint-1")
    run = start(tmp_path / "checkpoint-2", "staged")
    for act in (recover_partial_saves, newest, lambda folder: rotate(folder, 1)):
        act(tmp_path)
        assert len(staged_names(tmp_path)) == 2
    end(run)
    StagedDir.of(tmp_path / "checkpoint-3").discard()  # the next save clears up, too
    assert staged_names(tmp_path) == [mine.path.name]


def test_a_zombie_writer_counts_as_dead(tmp_path: Path) -> None:
    """As in a container whose first process is no init."""
    run = start(tmp_path / "checkpoint-2", "staged")
    os.kill(run.pid, signal.SIGKILL)
    os.waitid(os.P_PID, run.pid, os.WEXITED | os.WNOWAIT)
    recover_partial_saves(tmp_path)
    assert staged_names(tmp_path) == []
    end(run)


def test_another_process_with_the_number_of_a_dead_writer_is_not_the_writer(tmp_path: Path) -> None:
    staged = StagedDir.of(tmp_path / "a")
    host, pid, born, number = staged.path.name.rpartition("@")[2].rsplit("-", 3)
    stale = staged.path.rename(tmp_path / f".partial-a@{host}-{pid}-{int(born) - 60_000}-{number}")
    recover_partial_saves(tmp_path)
    assert not stale.exists()


def test_a_staged_folder_of_another_machine_goes_when_its_writer_is_gone(tmp_path: Path) -> None:
    """Whether its writer lives cannot be known; a file in it may be written although the folder was not for long."""
    staged = tmp_path / ".partial-checkpoint-1@another-machine.cluster-1-1-0"
    staged.mkdir()
    (staged / "weights").touch()
    recover_partial_saves(tmp_path)
    assert staged.exists()
    yesterday = time.time() - 25 * 3600
    os.utime(staged, (yesterday, yesterday))
    recover_partial_saves(tmp_path)
    assert staged.exists()
    os.utime(staged / "weights", (yesterday, yesterday))
    recover_partial_saves(tmp_path)
    assert not staged.exists()


def test_what_only_looks_like_a_staged_folder_stays(tmp_path: Path) -> None:
    for name in (".partial-", ".partial-notes", ".partial-a-1-2-3", "partial-a@b-1-2-3"):
        (tmp_path / name).mkdir()
    recover_partial_saves(tmp_path)
    recover_partial_saves(tmp_path / "missing")
    assert len(names(tmp_path)) == 4


# --- files for a folder that may hold other things


def is_weight(name: str) -> bool:
    return name.startswith("model")


def bring(place: Path, **files: str) -> None:
    staged = StagedDir.into(place)
    for name, text in files.items():
        path = staged.path / name.replace("_", ".")
        path.write_text(text)
    staged.commit_files(is_weight)


def test_files_go_into_a_folder_beside_others_and_stale_ones_go(tmp_path: Path) -> None:
    bring(tmp_path / "out", model_1="a", model_2="b", model_json="1 2", config_json="old")
    (tmp_path / "out" / "letters").write_text("dear")
    (tmp_path / "out" / "models").mkdir()
    bring(tmp_path / "out", model="c", config_json="new")
    assert names(tmp_path / "out") == ["config.json", "letters", "model", "models"] and names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "config.json").read_text() == "new"


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_private_files_of_other_libraries_get_the_modes_of_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        draft = StagedDir.into(tmp_path / "out")
        (draft.path / "weights").touch(mode=0o600)  # as safetensors writes them
        draft.commit_files()
    finally:
        os.umask(before)
    assert (tmp_path / "out" / "weights").stat().st_mode & 0o777 == 0o666 & ~mask


def test_folders_inside_are_merged(tmp_path: Path) -> None:
    for text in ("old", "new"):
        staged = StagedDir.into(tmp_path / "out")
        (staged.path / "sub").mkdir()
        (staged.path / "sub" / text).write_text(text)
        staged.commit_files()
    assert names(tmp_path / "out" / "sub") == ["new", "old"] and names(tmp_path / "out") == ["sub"]


def test_what_names_other_files_goes_first_and_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a folder in which this broke off has an index of nothing else than what is there: here it breaks off
    between two shards.
    """
    bring(tmp_path, model_1="a", model_2="b", model_json="index")
    replace, count = Path.replace, iter(range(9))

    def breaks(self: Path, target: Path) -> Path:
        if next(count) == 1:
            raise OSError(errno.EIO, "broken")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", breaks)
    with pytest.raises(SaveFailed, match="broken"):
        bring(tmp_path, model_1="A", model_2="B", model_json="index")
    assert [name for name in names(tmp_path) if not name.startswith(".")] == ["model.1", "model.2"]


def test_a_file_is_not_taken_for_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SaveFailed, match="it is a file"):
        StagedDir.into(tmp_path / "file")


def test_the_staged_folder_for_a_folder_that_is_there_lies_inside(tmp_path: Path) -> None:
    """It may be a disk of its own, and files are renamed within one disk only; what a killed one left there is
    cleared.
    """
    (tmp_path / "disk").mkdir()
    stale = StagedDir.into(tmp_path / "disk")
    stale.path.rename(stale.path.with_name(stale.path.name.replace(f"-{os.getpid()}-", "-999999999-")))
    staged = StagedDir.into(tmp_path / "disk")
    assert staged.path.parent == tmp_path / "disk" and staged_names(tmp_path / "disk") == [staged.path.name]
    assert StagedDir.into(tmp_path / "new").path.parent == tmp_path
