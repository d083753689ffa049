"""`outsize prune` killed after its library, or on a full disk: models are whole or absent, results stay as they are."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pruned
import pytest
from rich.console import Console

from outsize.base.errors import ConfigError, OutsizeError, SaveFailed
from outsize.run.prune_library import Library
from outsize.run.prune_sweep import sweep_run

VARIANTS = {"intermediate_size": [24], "num_key_value_heads": [1], "skip": ["ffn"], "linear": False, "copy": []}
TARGET = "prune.target=[{params: 0.8}, {params: 0.7}]"


def write(folder: Path, **prune: Any) -> Path:
    given = {**VARIANTS, "only_layers": [0, 1, 2], "tokens": 90, "keep": "latest", **prune}
    return pruned.write(folder, prune=given, val_set_size=2, bf16=False)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library, and the models of a run that was not killed."""
    folder = tmp_path_factory.mktemp("finished")
    yaml = write(folder)
    pruned.run(yaml)
    shutil.copytree(folder / "out", folder / "library")
    pruned.run(yaml, TARGET)
    return folder


@pytest.mark.parametrize("number", [pytest.param(None, marks=pytest.mark.full, id="every"), 3, 19])
def test_killed_while_models_are_chosen_and_written(tmp_path: Path, finished: Path, number: int | None) -> None:
    expected = contents(finished / "out" / "models")
    assert sum(name.endswith("prune.json") for name in expected) == 2
    for function in ("open", "fsync", "pwrite") if number is None else ("open",):
        for at in range(1, 10_000, 3) if number is None else [number]:
            out = tmp_path / f"{function}-{at}"
            shutil.copytree(finished / "library", out)
            more = [TARGET, f"output_dir={out}"]
            was_killed = pruned.killed_at(at, os, function, lambda: pruned.run(finished / "run.yaml", *more))  # noqa: B023
            assert was_killed or number is None
            made = [folder for folder in (out / "models").glob("params*") if not folder.name.startswith(".")]
            for folder in made:  # complete from the moment it is there
                assert contents(folder) == contents(finished / "out" / "models" / folder.name)
            assert pruned.run(finished / "run.yaml", *more).is_finished
            assert contents(out / "models") == expected
            assert contents(out / "library") == contents(finished / "out" / "library")
            shutil.rmtree(out)
            if not was_killed:
                break


def test_d6_a_sweep_of_three_killed_in_the_second(tmp_path: Path) -> None:
    """Ids, shapes and weights as in a clean run; finished results are not written again."""
    entries = [{"intermediate_size": [24]}, {"intermediate_size": [16], "loss": "mse"}, {"num_key_value_heads": [1]}]
    console = Console(quiet=True)

    def sweep(folder: Path) -> Path:
        none = dict.fromkeys(VARIANTS)
        return write(folder, **{**none, "linear": False, "sweep": entries, "target": {"params": 0.97}})

    assert sweep_run(sweep(tmp_path / "clean"), [], console) == []
    clean = contents(tmp_path / "clean" / "out" / "sweep")
    folders = {name.split("/")[0] for name in clean}
    assert len(folders) == 3 and all(any(name.startswith(f"{one}/models/") for name in clean) for one in folders)
    yaml = sweep(tmp_path / "killed")
    # Three layers of one variant each: the fifth entry of a library is the second of the second run.
    assert pruned.killed_at(5, Library, "finish", lambda: sweep_run(yaml, [], console))
    out = tmp_path / "killed" / "out" / "sweep"
    assert len(list(out.iterdir())) == 2
    before = {path: path.stat().st_mtime_ns for path in out.rglob("library/**/*") if path.is_file()}
    assert sweep_run(yaml, [], console) == []
    found = contents(out)
    assert found.keys() == clean.keys()
    for name, data in clean.items():
        if name.endswith((".safetensors", "config.json", "description.json")):
            assert found[name] == data, name
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())


def test_an_impossible_target_of_one_entry_does_not_stop_the_others(tmp_path: Path) -> None:
    yaml = write(tmp_path, sweep=[{"target": {"params": 0.01}}, {"tokens": 100}])
    failed = sweep_run(yaml, [], Console(quiet=True))
    assert len(failed) == 1 and "No choice of variants meets the target" in failed[0]
    assert len(list((tmp_path / "out" / "sweep").glob("*/library"))) == 2


@pytest.mark.parametrize("at", ["create", "write"])
def test_a_full_disk_in_the_cache_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """Of what was trained before; the same command continues."""
    yaml = write(tmp_path)
    made = pruned.run(yaml, dry_run=True).plan
    cache = tmp_path / "cache"
    small = [f"host_memory={made.host_bytes - 1}", f"prune.cache_dir={cache}"]
    pruned.run(yaml, "prune.only_layers=[0]")
    before = contents(tmp_path / "out" / "library")
    whole, plain, left = os.posix_fallocate, os.pwrite, [5]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def soon_full(fd: int, data: Any, offset: int) -> int:
        left[0] -= "hidden-states" in os.readlink(f"/proc/self/fd/{fd}")
        return plain(fd, data, offset) if left[0] > 0 else full()  # type: ignore[return-value]

    with monkeypatch.context() as patch:
        patch.setattr(os, *(("posix_fallocate", full) if at == "create" else ("pwrite", soon_full)))
        with pytest.raises(SaveFailed, match=r"prune.cache_dir: .*No space left.* name a\s+folder on another disk"):
            pruned.run(yaml, *small)
    assert os.posix_fallocate is whole
    assert contents(tmp_path / "out" / "library").items() >= before.items() and not any(cache.iterdir())
    assert pruned.run(yaml, *small).is_finished
    other = tmp_path / "other"
    other.mkdir()
    assert pruned.run(write(other)).is_finished
    pruned.require_equal(pruned.library(tmp_path / "out"), pruned.library(other / "out"))


def test_a_model_without_feed_forward_parts_or_kv_heads_is_refused_by_the_key(tmp_path: Path) -> None:
    import folders
    import transformers
    import zoo

    config = transformers.MambaConfig(vocab_size=zoo.VOCAB, hidden_size=32, state_size=4, num_hidden_layers=2)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path / "model")
    folders.write_tokenizer(tmp_path / "model")
    yaml = write(tmp_path, only_layers=[])
    with pytest.raises(ConfigError, match=r"prune.intermediate_size: no layer that is pruned has a part"):
        pruned.run(yaml, "prune.num_key_value_heads=null", "prune.skip=null")
    with pytest.raises(ConfigError, match=r"prune.num_key_value_heads: no layer that is pruned has a part"):
        pruned.run(yaml, "prune.intermediate_size=null", "prune.skip=null")
    assert not (tmp_path / "out" / "spec.json").exists()


@pytest.mark.parametrize("text", ["", "{", '{"scores": {}}', "[]"])
def test_damaged_scores_and_models_are_named(tmp_path: Path, finished: Path, text: str) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished / "out", out)
    (out / "scores.json").write_text(text)
    with pytest.raises(OutsizeError, match=r"scores.json is damaged .* Remove it; the same command makes it again"):
        pruned.run(finished / "run.yaml", f"output_dir={out}", TARGET)
    (out / "scores.json").unlink()
    (damaged, *_) = (out / "models").glob("*/prune.json")
    damaged.write_text(text)
    with pytest.raises(OutsizeError, match=r"prune.json is damaged .* Remove its folder; the same command makes it"):
        pruned.run(finished / "run.yaml", f"output_dir={out}", TARGET)
    shutil.rmtree(damaged.parent)
    assert pruned.run(finished / "run.yaml", f"output_dir={out}", TARGET).is_finished
    assert contents(out / "models") == contents(finished / "out" / "models")
