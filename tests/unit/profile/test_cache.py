"""Traces on disk: taken once, read afterwards, and never read for another question."""

import importlib
import json
import logging
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from cells import closing
from torch import nn

import outsize
from outsize.base.errors import DeviceOutOfMemory
from outsize.base.records import fingerprint
from outsize.device.device import Device
from outsize.device.sim import SimDevice
from outsize.hardware.catalog import lookup
from outsize.model.discover import find_layers
from outsize.profile import cache
from outsize.profile.cache import traced
from outsize.profile.tracer import Tracer


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry per trace that is really taken."""
    runs: list[str] = []

    class Counting(Tracer):
        def trace(self) -> Any:
            runs.append("taken")
            return super().trace()

    monkeypatch.setattr(cache, "Tracer", Counting)
    return runs


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTSIZE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "traces"


def machine(size: str = "64MiB") -> Device:
    return SimDevice(lookup(size))


def ask(model: nn.Module, batch: Any, device: Device | None = None) -> Any:
    return traced(model, batch, find_layers(model), device or machine())


def test_the_second_call_reads_what_the_first_wrote(folder: Path, taken: list[str]) -> None:
    first = ask(zoo.make("llama"), zoo.batch("llama"))
    second = ask(zoo.make("llama", seed=5), zoo.batch("llama", seed=5))  # other weights and other tokens: the same work
    assert taken == ["taken"] and second == first
    assert [fingerprint(r) for r in second] == [fingerprint(r) for r in first]
    files = list(folder.iterdir())
    assert len(files) == 1 and files[0].suffix == ".json", "no temporary file is left"


class Counts(nn.Linear):
    """Returns something else from call to call."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counts.calls += 1
        return super().forward(x) * Counts.calls


def test_what_a_trace_says_of_a_model_is_logged_again_when_it_is_read(
    folder: Path, taken: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = zoo.make("plain")
    model.layers[1].down = Counts(2 * zoo.HIDDEN, zoo.HIDDEN)
    for _ in range(2):
        caplog.clear()
        _, found = ask(model, zoo.batch("plain"))
        [note] = [record.getMessage() for record in caplog.records]
        assert found.notes == (note,) and note.startswith(
            "layers.1: a second run of the forward differs from the first (the second run returns"
        )
    assert taken == ["taken"]


def test_generators_that_modules_own_make_another_trace(folder: Path, taken: list[str]) -> None:
    """PVeRA with and without one are the same modules; with one they cannot be recomputed."""
    for generator in (None, torch.Generator()):
        model = zoo.make("plain")
        model.layers[0].generators = {"default": generator}
        ask(model, zoo.batch("plain"))
    assert taken == ["taken", "taken"]


def llama(**change: Any) -> nn.Module:
    return zoo.make("llama", **change)


def frozen(name: str) -> nn.Module:
    model = zoo.make("llama")
    model.get_parameter(name).requires_grad_(False)
    return model


def partly_eval() -> nn.Module:
    model = zoo.make("llama")
    model.model.layers[1].mlp.eval()
    return model


def eager() -> nn.Module:
    model = zoo.make("llama")
    model.set_attn_implementation("eager")
    return model


OTHER: dict[str, Any] = {
    "batch size": lambda: (llama(), zoo.batch("llama", size=3)),
    "batch length": lambda: (llama(), zoo.batch("llama", tokens=17)),
    "another input": lambda: (llama(), {**zoo.batch("llama"), "attention_mask": torch.ones(2, 16, dtype=torch.int64)}),
    "dtype of the batch": lambda: (llama(), {**zoo.batch("llama"), "input_ids": zoo.batch("llama")["input_ids"].int()}),
    "dtype": lambda: (llama(dtype=torch.bfloat16), zoo.batch("llama")),
    "frozen set": lambda: (frozen("model.embed_tokens.weight"), zoo.batch("llama")),
    "another frozen set": lambda: (frozen("model.layers.1.mlp.up_proj.weight"), zoo.batch("llama")),
    "attention": lambda: (eager(), zoo.batch("llama")),
    "evaluation": lambda: (llama().eval(), zoo.batch("llama")),
    "evaluation of a part": lambda: (partly_eval(), zoo.batch("llama")),
    "untied": lambda: (zoo.make("llama-untied"), zoo.batch("llama")),
    "another model": lambda: (zoo.make("qwen3"), zoo.batch("qwen3")),
}


def test_whatever_changes_the_work_is_another_key(folder: Path) -> None:
    """Trap F8: an answer belongs to its question. (The keys alone: taking all these traces would take seconds.)"""
    device = machine()
    keys = {"as it is": cache._key(llama(), zoo.batch("llama"), find_layers(llama()), device)}
    for name, make in OTHER.items():
        model, batch = make()
        keys[name] = cache._key(model, batch, find_layers(model), device)
    with torch.autocast("cpu", torch.bfloat16):
        keys["autocast"] = cache._key(llama(), zoo.batch("llama"), find_layers(llama()), device)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        keys["autocast without its cache"] = cache._key(llama(), zoo.batch("llama"), find_layers(llama()), device)
    slower = SimDevice(replace(lookup("64MiB"), flops=lookup("64MiB").flops / 2))
    keys["machine"] = cache._key(llama(), zoo.batch("llama"), find_layers(llama()), slower)
    same: dict[str, list[str]] = {}
    for name, key in keys.items():
        same.setdefault(key, []).append(name)
    assert all(len(names) == 1 for names in same.values()), same


def test_a_larger_machine_of_the_same_speed_has_the_same_trace(folder: Path, taken: list[str]) -> None:
    small, large = (ask(llama(), zoo.batch("llama"), machine(size)) for size in ("32MiB", "64MiB"))
    model = llama()
    graph, trace = Tracer(model, zoo.batch("llama"), find_layers(model), machine()).trace()
    assert taken == ["taken"] and small == large == (graph, replace(trace, profile_keys=large[1].profile_keys))


def test_another_batch_is_traced_and_both_are_kept(folder: Path, taken: list[str]) -> None:
    model = zoo.make("plain")
    small, large = ask(model, zoo.batch("plain")), ask(model, zoo.batch("plain", tokens=32))
    assert small != large and len(taken) == 2 and len(list(folder.iterdir())) == 2
    assert (
        ask(model, zoo.batch("plain")) == small
        and ask(model, zoo.batch("plain", tokens=32)) == large
        and len(taken) == 2
    )


def test_a_setting_of_the_root_is_another_key() -> None:
    """A block that runs once or three times: the cached trace has the wrong calls, and the first forward an
    OrderMismatch.
    """
    once, thrice = (zoo.PlainModel(num_blocks=1, loops=n, tied=False) for n in (1, 3))
    key = lambda m: cache._key(m, zoo.batch("plain"), find_layers(m), machine())
    assert key(once) != key(thrice)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"x": torch.ones(2), "loops": 1}, {"x": torch.ones(2), "loops": 3}),
        ((torch.ones(2),), (torch.ones(2, dtype=torch.bfloat16),)),
        ({"x": (torch.ones(2), torch.ones(2))}, {"x": (torch.ones(2), torch.ones(64))}),
    ],
    ids=["flag", "dtype in a tuple", "nested shape"],
)
def test_everything_in_the_batch_is_in_the_key(one: Any, other: Any) -> None:
    model = zoo.make("plain")
    key = lambda batch: cache._key(model, batch, find_layers(model), machine())
    assert key(one) != key(other)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: text.replace('"held_bytes"', '"hold_bytes"'),
        lambda text: text.replace('"graph"', '"graf"'),
        lambda text: json.dumps({"graph": json.loads(text)["graph"]}),
        lambda text: "[]",
    ],
    ids=["truncated", "empty", "another field", "another key", "half of it", "no mapping"],
)
def test_an_unreadable_file_is_taken_again_and_said_so(
    damage: Any, folder: Path, taken: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Trap F9: an older version's file, or one that a crash cut off."""
    model = zoo.make("plain")
    first = ask(model, zoo.batch("plain"))
    path = next(folder.iterdir())
    whole = path.read_text()
    path.write_text(damage(whole))
    with caplog.at_level(logging.WARNING, logger="outsize"):
        assert ask(model, zoo.batch("plain")) == first
    assert len(taken) == 2 and str(path) in caplog.text and "profiled again" in caplog.text
    assert json.loads(path.read_text()) == json.loads(whole), "and written again"
    assert ask(model, zoo.batch("plain")) == first and len(taken) == 2


def test_an_empty_setting_turns_the_cache_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: list[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTSIZE_CACHE", "")
    model = zoo.make("plain")
    assert ask(model, zoo.batch("plain")) == ask(model, zoo.batch("plain"))
    assert len(taken) == 2 and list(tmp_path.rglob("*")) == []


def test_the_default_folder_is_in_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OUTSIZE_CACHE", raising=False)
    ask(zoo.make("plain"), zoo.batch("plain"))
    assert len(list((tmp_path / ".cache" / "outsize" / "traces").glob("*.json"))) == 1


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only home, as on many clusters: the trace was taken and could be used."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTSIZE_CACHE", str(tmp_path / "file"))
    ask(zoo.make("plain"), zoo.batch("plain"))


# The code of the model is part of the key, and a run that contradicts a profile deletes it.

WIDE = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)).repeat(1, 1, COPIES).chunk(COPIES, -1)[0])

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()
"""


def written_model(folder: Path, copies: int) -> nn.Module:
    """A model of a file that was just edited."""
    (folder / "edited_model.py").write_text(WIDE.replace("COPIES", str(copies)))
    sys.modules.pop("edited_model", None)
    importlib.invalidate_caches()
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    return importlib.import_module("edited_model").Model()


def test_an_edited_forward_is_profiled_again(
    folder: Path, taken: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned 1.18 MB and out of memory at 2.56 MB, before the key held the code."""
    monkeypatch.syspath_prepend(str(tmp_path))
    batch = {"x": torch.zeros(4, 8, 16)}
    first = ask(written_model(tmp_path, 2), batch)
    assert ask(written_model(tmp_path, 2), batch) == first and taken == ["taken"]
    _, wider = ask(written_model(tmp_path, 9), batch)
    assert (
        taken == ["taken", "taken"]
        and wider.calls[1]["keep"].forward_peak_bytes > first[1].calls[1]["keep"].forward_peak_bytes
    )


def test_a_forward_that_was_replaced_on_a_module_or_a_class_is_profiled_again(
    folder: Path, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = zoo.make("plain"), zoo.batch("plain")
    ask(model, batch)
    own = model.layers[0].forward
    model.layers[0].forward = lambda *args, **kwargs: own(*args, **kwargs)
    ask(model, batch)
    cls = type(model.layers[1])
    real = cls.forward
    monkeypatch.setattr(cls, "forward", lambda self, *args, **kwargs: real(self, *args, **kwargs))
    ask(model, batch)
    assert taken == ["taken"] * 3


def test_what_a_function_was_made_with_is_in_the_key(folder: Path) -> None:
    """The same lines in a closure, with another value, another function, or another default."""

    def key(factor: object, default: int = 1) -> str:
        model = zoo.make("plain")
        own = model.layers[0].forward

        def forward(*args: Any, used: int = default, **kwargs: Any) -> Any:
            return own(*args, **kwargs) if factor else None

        model.layers[0].forward = forward
        return cache._key(model, zoo.batch("plain"), find_layers(model), machine())

    keys = [
        key(2),
        key(3),
        key((2, "a")),
        key((2, "b")),
        key(torch.tanh),
        key(lambda: 1),
        key(lambda: 2),
        key(2, default=5),
    ]
    assert len({*keys}) == len(keys) and key(2) == keys[0] and key(lambda: 1) == key(lambda: 1)


def test_a_run_that_contradicts_a_cached_profile_deletes_it(folder: Path, taken: list[str]) -> None:
    """The layers call a function of another file, which is not part of the key."""
    batch = {"x": torch.zeros(4, 64, 16)}
    model = Calling()
    with closing(
        outsize.prepare(
            model, batch, device=machine("1MiB"), gpu_memory="200KiB", host_memory="1MiB", chunk_bytes="1KiB"
        )
    ) as engine:
        assert engine.plan.profile_keys and len(list(folder.iterdir())) == 1
        monkeypatched = Calling.width
        Calling.width = 64
        try:
            with pytest.raises(DeviceOutOfMemory):
                model(**batch).backward()
        finally:
            Calling.width = monkeypatched
        assert not list(folder.iterdir())


class CallingLayer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).repeat(1, 1, Calling.width)[..., : x.shape[-1]]


class Calling(nn.Module):
    width = 1

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CallingLayer(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()
