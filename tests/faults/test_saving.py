"""Saving and loading when things go wrong: what was saved before is as it was, what is not whole is not taken, and
nothing is left behind.
"""

import contextlib
import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cells
import folders
import numpy as np
import pytest
import torch
import zoo
from cells import Cell
from parity.test_adapters import CASES as ADAPTED
from parity.test_resume import prepare_adapted
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import outsize
from outsize.base.errors import BadFile, EngineMisuse, SaveFailed
from outsize.checkpoint.contents import STATE
from outsize.checkpoint.folder import MANIFEST, newest, read_manifest
from outsize.checkpoint.model_files import INDEX, SINGLE
from outsize.checkpoint.tensorfile import TensorFile, TensorSpec
from outsize.runtime.engine import Engine

CELL = Cell(kind="llama", dtype="bf16", weights="host", optimizer="host")
HOMES = [("host", "host"), ("gpu", "gpu")]


@contextlib.contextmanager
def trained(steps: int = 1, *, cell: Cell = CELL, **how: Any) -> Iterator[Engine]:
    with cells.closing(cells.prepare(cell, **{"chunk_bytes": 4096, **how})) as engine:
        for seed in range(steps):
            step(engine, seed)
        yield engine


def step(engine: Engine, seed: int = 0) -> None:
    kind = "gpt2" if "GPT2" in type(engine.model).__name__ else "llama"
    engine.model(**zoo.batch(kind, seed=seed)).loss.backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def bits(engine: Engine) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint holds."""
    engine.drain()
    found = {name: engine.runtime.store.value(name).clone() for name in engine.runtime.store.params}
    for name in engine.optimizer.names:
        found |= {
            f"{part}/{name}": torch.as_tensor(value).clone() for part, value in engine.optimizer_state(name).items()
        }
    groups = [group[key] for group in engine.optimizer.param_groups for key in ("lr", "eps", "weight_decay")]
    return {**found, "groups": torch.tensor(groups), "steps": torch.tensor(engine.num_steps)}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def saved_bits(folder: Path) -> dict[str, torch.Tensor]:
    """What an engine has that loads it."""
    with trained(2) as engine:
        engine.load(folder)
        return bits(engine)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextlib.contextmanager
def nothing_is_left(folder: Path) -> Iterator[None]:
    """No file, no staged folder, no thread, no open file more than before."""
    before, descriptors = names(folder), len(os.listdir("/proc/self/fd"))
    yield
    assert names(folder) == before
    assert [thread.name for thread in threading.enumerate() if thread.name == "outsize-save"] == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


class Gate:
    """The thread that saves waits before each write until this is open: so a test decides what happens meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.opened, self.reached = threading.Event(), threading.Event()
        pwrite = os.pwrite

        def gated(*args: Any) -> int:
            if threading.current_thread().name == "outsize-save":
                self.reached.set()
                assert self.opened.wait(60)
            return pwrite(*args)

        monkeypatch.setattr(os, "pwrite", gated)

    def open(self) -> None:
        self.opened.set()

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Opens by itself while the body runs, and waits."""
        timer = threading.Timer(0.3, self.open)
        timer.start()
        yield
        timer.join()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open()


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """As on a full disk: no file grows beyond this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# --- disks


@pytest.mark.parametrize(("weights", "optimizer"), HOMES)
def test_a_full_disk_is_reported_and_the_earlier_checkpoint_stays(tmp_path: Path, weights: Any, optimizer: Any) -> None:
    with trained(cell=Cell(kind="llama", dtype="bf16", weights=weights, optimizer=optimizer)) as engine:
        engine.save(tmp_path / "checkpoint-1")
        step(engine, 1)
        before = bits(engine)
        for verb in (engine.save, engine.export):
            with (
                nothing_is_left(tmp_path),
                largest_file(2**16),
                pytest.raises(SaveFailed, match=r"File too large.*Free some space"),
            ):
                verb(tmp_path / "checkpoint-2")
        assert newest(tmp_path) == tmp_path / "checkpoint-1" and same(bits(engine), before)
        engine.save(tmp_path / "checkpoint-2")
        assert same(saved_bits(tmp_path / "checkpoint-2"), before)


def test_a_full_disk_in_the_background_surfaces_at_the_next_step_and_costs_nothing_else(
    tmp_path: Path, gate: Gate
) -> None:
    with trained() as engine, trained() as other:
        engine.save(tmp_path / "checkpoint-1")
        first = bits(engine)
        with nothing_is_left(tmp_path):
            with largest_file(2**16), pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    os, "ftruncate", lambda fd, size: None
                )  # a limit, other than a full disk, would show here already
                engine.save(tmp_path / "checkpoint-2", background=True)
                gate.open()
                _wait_for_the_thread()
            engine.model(**zoo.batch("llama", seed=1)).loss.backward()
            with pytest.raises(SaveFailed, match=r"checkpoint-2 cannot be written: File too large"):
                engine.optimizer.step()
        engine.optimizer.step()  # the gradients are still there
        engine.optimizer.zero_grad()
        step(other, 1)
        assert same(bits(engine), bits(other))
        assert newest(tmp_path) == tmp_path / "checkpoint-1" and same(saved_bits(tmp_path / "checkpoint-1"), first)


def _wait_for_the_thread() -> None:
    for thread in threading.enumerate():
        if thread.name == "outsize-save":
            thread.join()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real one that can be filled."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True, check=False
    ).returncode:
        pytest.skip("needs the right to mount")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(disk: Path, *, but_for: int) -> None:
    (disk / "junk").write_bytes(b"\0" * (shutil.disk_usage(disk).free - but_for))


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("left", [0, 2**12, 2**15, 2**17])
def test_a_disk_that_fills_up_in_the_middle_is_reported(small_disk: Path, left: int, background: bool) -> None:
    """Somebody else takes the space after it was seen to be enough: before the first file, or when some of it is
    written.
    """
    with trained() as engine:
        engine.save(small_disk / "checkpoint-1")
        (small_disk / "junk").touch()
        with nothing_is_left(small_disk), pytest.raises(SaveFailed, match="No space left on device"):
            engine.save(
                small_disk / "checkpoint-2", background=background, extra=lambda folder: fill(small_disk, but_for=left)
            )
            engine.finish_saving()
        read_manifest(small_disk / "checkpoint-1")
        with nothing_is_left(small_disk), pytest.raises(SaveFailed, match=r"needs .* of disk space, but .* is free"):
            engine.save(small_disk / "checkpoint-2", background=background)
        (small_disk / "junk").unlink()
        engine.save(small_disk / "checkpoint-2", background=background)
        engine.finish_saving()
        assert newest(small_disk) == small_disk / "checkpoint-2"


def test_an_export_goes_into_a_disk_of_its_own(small_disk: Path) -> None:
    with trained() as engine:
        engine.export(small_disk)
        engine.export(small_disk)
    assert names(small_disk) == ["config.json", "generation_config.json", SINGLE]


def test_a_place_that_cannot_be_written_is_reported_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with trained() as engine, nothing_is_left(tmp_path):
        for place in (tmp_path / "file" / "checkpoint-1", Path("/proc/checkpoint-1")):
            for verb in (engine.save, engine.export):
                with pytest.raises(SaveFailed, match=r"cannot be written|not a folder"):
                    verb(place)
        with pytest.raises(SaveFailed, match="it is a file"):
            engine.export(tmp_path / "file")
        step(engine)


def test_an_adapter_on_a_full_disk_is_reported_too(tmp_path: Path) -> None:
    """Its files are written by PEFT, whose errors are its own."""
    with cells.closing(prepare_adapted(ADAPTED["lora"], "resident")) as engine:
        with nothing_is_left(tmp_path), largest_file(2**12), pytest.raises(SaveFailed, match="cannot be written"):
            engine.save(tmp_path / "checkpoint-1")
        engine.save(tmp_path / "checkpoint-1")


# --- the background


@pytest.mark.parametrize("device", ["cpu", "sim:64MiB"])
@pytest.mark.parametrize("update", ["after_step", "in_backward"])
def test_an_update_waits_until_its_chunk_is_written(tmp_path: Path, gate: Gate, update: Any, device: str) -> None:
    """The hazard: a chunk is updated while it is on its way to the disk, and the checkpoint is of two steps at once.

    Forced: not a byte of the background's part is written before the next step has begun. Without the wait the step
    would be over by then.
    """
    cell = Cell(kind="llama", dtype="bf16", weights="host", optimizer="host", update=update)
    with cells.closing(cells.prepare(cell, device, chunk_bytes=4096)) as engine:
        cells.train_cell(cell, engine, steps=1)
        before = bits(engine)
        engine.save(tmp_path / "checkpoint-1", background=True)
        assert gate.reached.wait(60)
        with gate.opening():
            cells.train_cell(cell, engine, steps=1)
        engine.finish_saving()
        assert not same(bits(engine), before)
    assert same(saved_bits(tmp_path / "checkpoint-1"), before)


def test_an_interrupted_wait_leaves_the_save_on_its_way_and_updates_waiting(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in finish_saving, and the user goes on training."""
    with trained() as engine:
        before = bits(engine)
        engine.save(tmp_path / "checkpoint-1", background=True)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "join", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.finish_saving()
        with gate.opening():
            step(engine, 1)
        engine.finish_saving()
    assert same(saved_bits(tmp_path / "checkpoint-1"), before)


def _interrupt(*args: Any, **kwargs: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("when", ["configs", "extra", "tensors", "publish"])
def test_an_interrupted_save_leaves_nothing_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    with trained() as engine, trained() as other:
        for background in (False, True) if when in ("configs", "extra") else (False,):
            with nothing_is_left(tmp_path), monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                if when == "configs":
                    patch.setattr(type(engine.model.config), "save_pretrained", _interrupt)
                elif when != "extra":
                    patch.setattr(os, {"tensors": "pwrite", "publish": "fsync"}[when], _interrupt)
                engine.save(
                    tmp_path / "checkpoint-1", background=background, extra=_interrupt if when == "extra" else None
                )
        step(engine, 1)
        step(other, 1)
        assert same(bits(engine), bits(other))
        engine.save(tmp_path / "checkpoint-1", background=True)
    assert newest(tmp_path) == tmp_path / "checkpoint-1"


def test_what_is_written_beside_may_fail_and_leaves_nothing(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        (folder / "half").touch()
        raise ValueError("mine")

    with trained() as engine:
        for background in (False, True):
            with nothing_is_left(tmp_path), pytest.raises(ValueError, match="mine"):
                engine.save(tmp_path / "checkpoint-1", background=background, extra=fails)
        with nothing_is_left(tmp_path), pytest.raises(SaveFailed, match=MANIFEST):
            engine.save(tmp_path / "checkpoint-1", extra=lambda folder: (folder / MANIFEST).touch())
        with nothing_is_left(tmp_path), pytest.raises(SaveFailed, match=STATE):
            engine.save(tmp_path / "checkpoint-1", extra=lambda folder: (folder / STATE).touch())
        step(engine)


@pytest.mark.parametrize("hears", ["step", "finish", "save", "detach", "load"])
def test_a_failure_in_the_background_is_heard_even_if_it_was_there_before_save_returned(
    tmp_path: Path, hears: str
) -> None:
    def fails() -> None:
        raise RuntimeError("after it was published")

    with trained() as engine:
        engine.save(tmp_path / "earlier")
        engine.save(tmp_path / "checkpoint-1", background=True, then=fails)
        _wait_for_the_thread()
        act: dict[str, Callable[[], Any]] = {
            "step": lambda: step(engine, 1),
            "finish": engine.finish_saving,
            "save": lambda: engine.save(tmp_path / "checkpoint-2"),
            "detach": engine.detach,
            "load": lambda: engine.load(tmp_path / "earlier"),
        }
        with pytest.raises(RuntimeError, match="after it was published"):
            act[hears]()
        engine.finish_saving()  # once is enough
        assert newest(tmp_path) == tmp_path / "checkpoint-1", "what was published is there"


def test_what_comes_after_is_called_once_and_sees_the_checkpoint(tmp_path: Path) -> None:
    seen: list[Path | None] = []
    with trained() as engine:
        for i, background in enumerate((False, True)):
            engine.save(tmp_path / f"checkpoint-{i}", background=background, then=lambda: seen.append(newest(tmp_path)))
            engine.finish_saving()
    assert seen == [tmp_path / "checkpoint-0", tmp_path / "checkpoint-1"]


def test_a_save_in_the_background_outlives_the_end_of_the_program(tmp_path: Path) -> None:
    script = (
        "import sys; sys.path[:0] = ['src', 'tests']\nimport torch; torch.set_num_threads(1)\nimport os, time, "
        "cells\nfrom pathlib import Path\n"
        "pwrite = os.pwrite\nos.pwrite = lambda *args: (time.sleep(0.01), pwrite(*args))[1]\n"
        "engine = cells.prepare(cells.Cell(kind='llama', weights='host', optimizer='host'))\n"
        "engine.save(Path(sys.argv[1]) / 'checkpoint-0', background=True)\nraise SystemExit('done')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=600, check=False
    )
    assert run.stderr.strip().endswith("done") and newest(tmp_path) == tmp_path / "checkpoint-0"


def test_where_no_thread_can_be_started_the_save_is_made_in_the_foreground(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with trained() as engine:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", none_left)
            engine.save(tmp_path / "checkpoint-1", background=True)
        assert newest(tmp_path) == tmp_path / "checkpoint-1"
        step(engine)


# --- when one may save


def test_gradients_that_wait_for_a_step_are_not_lost_in_a_save(tmp_path: Path) -> None:
    with trained() as engine, nothing_is_left(tmp_path):
        out = engine.model(**zoo.batch("llama"))
        for verb in (engine.save, engine.export, engine.load):
            with pytest.raises(EngineMisuse, match="only possible between steps"):
                verb(tmp_path / "checkpoint-1")
        out.loss.backward()
        for verb in (engine.save, engine.export):
            with pytest.raises(EngineMisuse, match="gradients have accumulated"):
                verb(tmp_path / "checkpoint-1")
        engine.optimizer.step()
    cell = Cell(kind="llama", weights="host", optimizer="host", update="in_backward")
    with cells.closing(cells.prepare(cell)) as engine, nothing_is_left(tmp_path):
        with engine.last_backward():
            engine.model(**zoo.batch("llama")).loss.backward()
        with pytest.raises(EngineMisuse, match=r"step\(\) is missing"):
            engine.save(tmp_path / "checkpoint-1")
        engine.optimizer.step()


def test_what_is_there_is_not_written_over_by_default(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters").write_text("dear")
    with trained() as engine:
        engine.save(tmp_path / "a")
        first = bits(engine)
        step(engine, 1)
        with nothing_is_left(tmp_path), pytest.raises(SaveFailed, match=r"a exists already"):
            engine.save(tmp_path / "a", background=True)
        assert same(saved_bits(tmp_path / "a"), first)
        with nothing_is_left(tmp_path), pytest.raises(SaveFailed, match="cannot be replaced"):
            engine.save(tmp_path / "home", replace=True)
        engine.save(tmp_path / "a", replace=True)
        assert (
            same(saved_bits(tmp_path / "a"), bits(engine))
            and names(tmp_path) == ["a", "home"]
            and names(tmp_path / "home") == ["letters"]
        )


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_every_file_has_the_mode_that_the_umask_leaves(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        with trained() as engine:
            engine.save(tmp_path / "checkpoint-1", background=True)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "checkpoint-1").iterdir()} == {0o666 & ~mask}


def test_settings_may_be_tensors_and_whatever_schedulers_leave(tmp_path: Path) -> None:
    with trained() as engine, trained() as other:
        torch.optim.lr_scheduler.OneCycleLR(engine.optimizer, max_lr=0.1, total_steps=10)
        engine.optimizer.param_groups[0].update(lr=torch.tensor(0.25), weight_decay=np.float32(0.5), betas=[0.5, 0.75])
        engine.save(tmp_path / "checkpoint-1", background=True)
        engine.finish_saving()
        other.load(tmp_path / "checkpoint-1")
        group = other.optimizer.param_groups[0]
        assert (group["lr"], group["weight_decay"], group["betas"], group["max_lr"]) == (0.25, 0.5, (0.5, 0.75), 0.1)
        step(other, 1)


def test_an_adapter_inside_a_model_of_transformers_is_saved_as_transformers_saves_it(tmp_path: Path) -> None:
    def adapted(seed: int) -> LlamaForCausalLM:
        model = zoo.make("llama")
        torch.manual_seed(seed)
        model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        return model.train()

    with cells.closing(
        cells.prepare_by_hand(adapted(0), zoo.batch("llama"), spec=CELL.spec, weights="host", optimizer="host")
    ) as engine:
        step(engine)
        engine.save(tmp_path / "checkpoint-1", background=True)
        before = bits(engine)
    engine.model.save_pretrained(tmp_path / "theirs")
    assert SINGLE not in names(tmp_path / "theirs")
    assert set(names(tmp_path / "checkpoint-1")) == {*names(tmp_path / "theirs"), STATE, MANIFEST}
    for path in (tmp_path / "theirs").iterdir():
        assert (tmp_path / "checkpoint-1" / path.name).read_bytes() == path.read_bytes(), path.name
    with cells.closing(cells.prepare_by_hand(adapted(1), zoo.batch("llama"), spec=CELL.spec)) as other:
        other.load(tmp_path / "checkpoint-1")
        assert same(bits(other), before)


# --- loading what is damaged or another's


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


def header_bytes(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[:8], "little")


def rewrite(folder: Path, file: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Another tensor file of the right form in its place, and a manifest that says so."""
    tensors = load_file(folder / file)
    change(tensors)
    (folder / file).unlink()
    with TensorFile.create(
        folder / file, {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}, {}
    ) as made:
        for name, tensor in tensors.items():
            made.write(name, tensor)
    remanifest(folder, lambda facts: facts["files"].update({file: (folder / file).stat().st_size}))


def remanifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    facts = json.loads((folder / MANIFEST).read_text())
    change(facts)
    (folder / MANIFEST).write_text(json.dumps(facts))


NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, MANIFEST),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), MANIFEST),
    "half a manifest": (lambda f: (f / MANIFEST).write_text((f / MANIFEST).read_text()[:500]), MANIFEST),
    "a manifest of something else": (lambda f: remanifest(f, lambda facts: facts.pop("values")), "is missing or wrong"),
    "a manifest with a word for a number": (
        lambda f: remanifest(f, lambda facts: facts.update(num_steps="many")),
        "is missing or wrong",
    ),
    "another format": (lambda f: remanifest(f, lambda facts: facts.update(format=2)), "format"),
    "a value in a file outside": (
        lambda f: remanifest(f, lambda facts: facts["values"].update({NORM: ["../out.safetensors", "x"]})),
        "not in its list of files",
    ),
    "a value under a key that is not there": (
        lambda f: remanifest(f, lambda facts: facts["values"].update({NORM: [STATE, "x"]})),
        "has no x",
    ),
    "weights cut off": (lambda f: os.truncate(f / SINGLE, 5000), rf"{SINGLE} has 5000 bytes instead of \d+"),
    "state cut off": (lambda f: os.truncate(f / STATE, 5000), rf"{STATE} has 5000 bytes instead of \d+"),
    "no state": (lambda f: (f / STATE).unlink(), f"{STATE} is missing"),
    "a header of weights": (lambda f: flip(f / SINGLE, 3), SINGLE),
    "a header of state": (lambda f: flip(f / STATE, 3), STATE),
    "the middle of a header of weights": (lambda f: flip(f / SINGLE, header_bytes(f / SINGLE) // 2), SINGLE),
    "the middle of a header of state": (lambda f: flip(f / STATE, header_bytes(f / STATE) // 2), STATE),
    "the end of a header of state": (lambda f: flip(f / STATE, header_bytes(f / STATE) + 4), STATE),
    "state without a moment": (
        lambda f: rewrite(f, STATE, lambda tensors: tensors.pop(f"exp_avg/{NORM}")),
        f"has no exp_avg/{NORM}",
    ),
    "state without a master": (
        lambda f: rewrite(f, STATE, lambda tensors: tensors.pop(f"lo/{EMBED}")),
        f"has no lo/{EMBED}",
    ),
    "a moment of another shape": (
        lambda f: rewrite(f, STATE, lambda t: t.update({f"exp_avg/{NORM}": torch.ones(3)})),
        f"exp_avg of {NORM} is",
    ),
    "a moment of another dtype": (
        lambda f: rewrite(f, STATE, lambda t: t.update({f"exp_avg/{NORM}": torch.ones(32).half()})),
        "float16",
    ),
    "a weight of another dtype": (
        lambda f: rewrite(f, SINGLE, lambda t: t.update({NORM: torch.ones(32)})),
        f"{NORM} is torch.float32",
    ),
    "no step of a parameter": (
        lambda f: remanifest(f, lambda facts: facts["steps"].pop(NORM)),
        f"{NORM} was frozen there and is trained here",
    ),
    "no value of a parameter": (lambda f: remanifest(f, lambda facts: facts["values"].pop(NORM)), f"it has no {NORM}"),
    "groups of others": (lambda f: remanifest(f, lambda facts: facts["groups"][0]["names"].pop()), "groups of"),
    "no optimizer": (lambda f: remanifest(f, lambda facts: facts.update(only_model=True)), "only_model=True"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "checkpoint-1"
    with trained() as engine:
        engine.save(folder)
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_changes_nothing(damage: str, checkpoint: Path, tmp_path: Path) -> None:
    act, match = DAMAGES[damage]
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint-1")
    act(folder)
    with trained(2) as engine:
        before = bits(engine)
        descriptors = len(os.listdir("/proc/self/fd"))
        with pytest.raises(BadFile, match=match):
            engine.load(folder)
        assert same(bits(engine), before) and len(os.listdir("/proc/self/fd")) == descriptors
        step(engine, 2)
        engine.load(checkpoint)
        assert not same(bits(engine), before)


OTHERS: dict[str, tuple[Cell, dict[str, Any], str]] = {
    "another kind": (Cell(kind="gpt2", dtype="bf16"), {}, r"it has no transformer\.h"),
    "more layers": (Cell(kind="one-block", dtype="bf16"), {}, r"it has model\.layers\.1.*, which is not in the model"),
    "an untied head": (Cell(kind="llama-untied", dtype="bf16"), {}, r"it has no lm_head\.weight"),
    "another dtype": (Cell(kind="llama", dtype="fp32"), {}, r"is torch\.bfloat16 .* there and torch\.float32 .* here"),
    "frozen parts": (
        Cell(kind="llama", dtype="bf16", frozen="prefix"),
        {},
        r"embed_tokens\.weight was trained there and is frozen here",
    ),
    "other groups": (
        Cell(kind="llama", dtype="bf16"),
        {"spec": outsize.AdamW(groups=[{"params": [NORM], "lr": 1.0}])},
        r"groups of \[38\] parameters and this one of \[1, 37\]",
    ),
}


@pytest.mark.parametrize("which", OTHERS)
def test_a_checkpoint_of_another_model_is_named_and_changes_nothing(which: str, checkpoint: Path) -> None:
    cell, how, match = OTHERS[which]
    with trained(cell=cell, **how) as engine:
        before = bits(engine)
        with pytest.raises(BadFile, match=match):
            engine.load(checkpoint)
        assert same(bits(engine), before)
        step(engine, 1)


def test_frozen_weights_and_groups_do_not_matter_to_weights_alone(checkpoint: Path) -> None:
    for which in ("frozen parts", "other groups"):
        cell, how, _ = OTHERS[which]
        with trained(cell=cell, **how) as engine, trained() as saved:
            engine.load(checkpoint, only_model=True)
            assert all(
                torch.equal(value, saved.model.state_dict()[name]) for name, value in engine.model.state_dict().items()
            )


@pytest.mark.parametrize("at", ["weights", "optimizer's state"])
def test_a_load_that_breaks_off_is_not_trained_on(
    at: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails in the middle: some weights are new, some old. Nothing can be compared beforehand that would
    tell.
    """
    with trained(2) as engine, trained() as saved:
        num_weights, preadv = len(engine.runtime.store.params), os.preadv
        left = iter(range(5 if at == "weights" else num_weights + 5, -9, -1))

        def fails(*args: Any) -> int:
            if next(left) == 0:
                raise OSError(errno.EIO, "Input/output error")
            return preadv(*args)

        with monkeypatch.context() as patch, pytest.raises(BadFile, match="Input/output error"):
            patch.setattr(os, "preadv", fails)
            engine.load(checkpoint)
        engine.model(**zoo.batch("llama")).loss.backward()
        with pytest.raises(EngineMisuse, match=f"Loading was interrupted in the {at}"):
            engine.optimizer.step()
        engine.optimizer.zero_grad()
        for verb in (engine.save, engine.export):
            with nothing_is_left(tmp_path), pytest.raises(EngineMisuse, match="Load a checkpoint that can be read"):
                verb(tmp_path / "checkpoint-3")
        engine.load(checkpoint)
        assert same(bits(engine), bits(saved))
        step(engine)


# --- killed

KILLED = r"""
import gc, json, os, shutil, signal, sys
sys.path[:0] = ["src", "tests"]
import torch; torch.set_num_threads(1)
from pathlib import Path
import cells
from faults.test_saving import CELL, bits, names, same, step
from outsize.checkpoint.folder import newest, read_manifest

spare = Path(sys.argv[1]) / "spare"
engine = cells.prepare(CELL, chunk_bytes=2**14)
other = cells.prepare(CELL, chunk_bytes=2**14)
step(engine)
engine.save(spare)
old = bits(engine)
step(engine, 1)
new = bits(engine)
gc.freeze()  # or every child copies the pages that its collector touches

def save(place, background, replace, kill_at):
    '''In a child: every write, sync, rename and removal is a moment at which it may be killed.'''
    pipe = os.pipe()
    if child := os.fork():
        os.close(pipe[1])
        text = os.read(pipe[0], 100)
        os.close(pipe[0])
        status = os.waitpid(child, 0)[1]
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else int(text)
    count = 0
    def timing(function):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return call
    for name in ("pwrite", "fsync", "rename", "mkdir", "ftruncate", "unlink", "rmdir"):
        setattr(os, name, timing(getattr(os, name)))
    engine.save(place, background=background, replace=replace)
    engine.finish_saving()
    os.write(pipe[1], str(count).encode())
    os._exit(0)

def outcomes(folder, background, replace):
    def begin():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(spare, folder / "checkpoint-1")
        return folder / ("checkpoint-1" if replace else "checkpoint-2"), background, replace
    moments = save(*begin(), None)
    # All of the last ones: there it becomes a checkpoint, in the background by the same calls.
    for moment in sorted({*range(1, moments, 45), *range(moments - 12, moments + 1, 4 if background else 1)}):
        assert save(*begin(), moment) == signal.SIGKILL, moment
        found = newest(folder)
        other.load(found)
        now = bits(other)
        which = "old" if same(now, old) else "new" if same(now, new) else "torn"
        assert names(folder) == sorted({"checkpoint-1", found.name}), names(folder)
        yield moment, found.name, which

ways = [(background, replace) for background in ("foreground", "background") for replace in ("fresh", "replace")]
print(json.dumps({"-".join(way): list(outcomes(spare.parent / "-".join(way), way[0] == "background", way[1] == "replace")) for way in ways}))
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, str, str]]]:
    """One process for all of them: to start it takes longer than to be killed."""
    run = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path_factory.mktemp("killed"))],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("replace", ["fresh", "replace"])
@pytest.mark.parametrize("background", ["foreground", "background"])
def test_a_save_that_is_killed_at_any_moment_leaves_one_whole_checkpoint_to_go_on_from(
    background: str, replace: str, killed: dict[str, list[tuple[int, str, str]]]
) -> None:
    outcomes = killed[f"{background}-{replace}"]
    assert {which for _, _, which in outcomes} == {"old", "new"}, outcomes
    kept = [which for _, _, which in outcomes]
    assert kept == sorted(kept, reverse=True), "old ones until it is complete, new ones from then on"
    assert all((name == "checkpoint-1") == (which == "old") or replace == "replace" for _, name, which in outcomes)


# --- export

LOGITS = """
import sys, torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
assert "outsize" not in sys.modules
ids = torch.tensor([[5, 9, 11, 40]])
torch.save([AutoModelForCausalLM.from_pretrained(folder)(ids).logits for folder in sys.argv[2:]], sys.argv[1])
"""


def test_an_export_gives_the_same_logits_in_a_process_that_knows_nothing_of_us(tmp_path: Path) -> None:
    """One process for both: to start it takes longer than the rest."""
    folders, expected = [], []
    for kind, dtype in (("llama", "bf16"), ("mixtral", "fp32")):
        cell = Cell(kind=kind, dtype=dtype, weights="host", optimizer="host")  # type: ignore[arg-type]
        folders.append(tmp_path / kind)
        with cells.closing(cells.prepare(cell)) as engine:
            cells.train_cell(cell, engine, steps=2)
            engine.export(folders[-1])
        with torch.no_grad():
            expected.append(engine.model.eval()(torch.tensor([[5, 9, 11, 40]])).logits)
    command = [sys.executable, "-c", LOGITS, str(tmp_path / "logits"), *map(str, folders)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    for found, wanted in zip(torch.load(tmp_path / "logits"), expected, strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)


EXPORTED = ("llama", "llama-untied", "gemma2", "gpt2", "mixtral", "t5", "bert")
ALL_HOMES = [*HOMES, ("gpu", "host"), ("host", "streamed")]


@pytest.mark.parametrize(
    ("kind", "weights", "optimizer"),
    [  # each kind once, the homes by turns; the others in `make test-all`
        pytest.param(kind, *homes, marks=[] if i % len(ALL_HOMES) == j else [pytest.mark.full])
        for i, kind in enumerate(EXPORTED)
        for j, homes in enumerate(ALL_HOMES)
    ],
)
def test_exports_and_checkpoints_hold_what_the_detached_model_saves_to_the_byte(
    tmp_path: Path, kind: str, weights: Any, optimizer: Any
) -> None:
    cell = Cell(kind=kind, dtype="bf16", weights=weights, optimizer=optimizer)
    with cells.closing(cells.prepare(cell, "sim:64MiB")) as engine:
        cells.train_cell(cell, engine, steps=1)
        engine.export(tmp_path / "out")
        engine.save(tmp_path / "checkpoint-1", background=True)
    engine.model.save_pretrained(tmp_path / "theirs")
    assert names(tmp_path / "out") == names(tmp_path / "theirs")
    for path in (tmp_path / "theirs").iterdir():
        assert (
            (tmp_path / "out" / path.name).read_bytes()
            == path.read_bytes()
            == (tmp_path / "checkpoint-1" / path.name).read_bytes()
        ), path.name


def test_an_export_takes_the_place_of_one_of_another_shape(tmp_path: Path) -> None:
    zoo.make("llama", seed=9).save_pretrained(tmp_path / "out", max_shard_size="20KB")
    (tmp_path / "out" / "README.md").write_text("mine")
    assert (tmp_path / "out" / INDEX).exists()
    with trained() as engine:
        engine.export(tmp_path / "out", tokenizer=folders.write_tokenizer(tmp_path / "tokenizer"))
        state = {name: value.clone() for name, value in engine.model.state_dict().items()}
    assert set(names(tmp_path / "out")) == {
        "README.md",
        "config.json",
        "generation_config.json",
        SINGLE,
        *names(tmp_path / "tokenizer"),
    }
    again = LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in state.items())


def test_an_adapter_may_be_exported_beside_its_base(tmp_path: Path) -> None:
    case = ADAPTED["lora"]
    case.base().save_pretrained(tmp_path)
    before = (tmp_path / SINGLE).read_bytes()
    with cells.closing(prepare_adapted(case, "send")) as engine:
        engine.export(tmp_path)
    assert (
        (tmp_path / SINGLE).read_bytes() == before
        and (tmp_path / "adapter_model.safetensors").exists()
        and STATE not in names(tmp_path)
    )


def test_caches_are_in_the_config_as_the_user_had_them(tmp_path: Path) -> None:
    model = zoo.make("llama")
    model.config.use_cache = True
    with cells.closing(cells.prepare_by_hand(model, zoo.batch("llama"), spec=CELL.spec)) as engine:
        engine.export(tmp_path / "out")
        assert model.config.use_cache is False
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.use_cache is True


# --- host memory

MEMORY = r"""
import json, resource, sys
from pathlib import Path
sys.path.insert(0, "src")
import torch
from torch import nn
import outsize

class Net(nn.Module):
    def __init__(self, size, count):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=False, dtype=torch.bfloat16) for _ in range(count))
    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return {"loss": x.float().square().mean()}

def peak():
    # Of this program alone: ru_maxrss begins with what the process held that started it.
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

def cycle(size, count, **how):
    batch = {"x": torch.ones(1, size, dtype=torch.bfloat16)}
    model = Net(size, count)
    engine = outsize.prepare(model, batch, device="cpu", chunk_bytes="8MiB", **how)
    for _ in range(2):
        model(**batch)["loss"].backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    before = peak()
    folder = Path(sys.argv[1]) / str(size)
    engine.save(folder / "checkpoint-1")
    engine.save(folder / "checkpoint-2", background=True)
    engine.export(folder / "out")
    engine.load(folder / "checkpoint-2")
    state = sum(num_bytes for (part, _), num_bytes in engine.runtime.place.host.items() if part == "host_state")
    return {"growth": peak() - before, "weights": sum(p.nbytes for p in model.parameters()), "state": state}

cycle(8, 3)
print(json.dumps(cycle(2048, 8, gpu_memory="60MiB")))
"""


def test_neither_saving_nor_loading_copies_the_model(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, timeout=600, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    facts = json.loads(run.stdout.splitlines()[-1])
    assert facts["weights"] == 2**26 and facts["state"] >= 2**28
    assert facts["growth"] < facts["weights"] / 2, facts
