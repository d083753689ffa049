"""`outsize probe` as a user meets it here: without a GPU; and the file that it writes, used by the other commands."""

import dataclasses
from pathlib import Path

import pytest
import transformers
from typer.testing import CliRunner

from outsize.calibration.rates import Identity, save_probe
from outsize.cli import doctor
from outsize.cli.main import app
from outsize.device.choose import choose_device
from outsize.device.cpu import CpuDevice
from outsize.hardware.catalog import CATALOG, lookup
from outsize.hardware.machine import Machine, write_machine

runner = CliRunner()
SHAPE = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=64,
)


def test_the_host_is_measured_and_the_file_plans(tmp_path: Path) -> None:
    box = tmp_path / "box.yaml"
    choose_device("cpu").budgets.clear()  # of engines that other tests of this process have left behind
    result = runner.invoke(app, ["probe", "--device", "cpu", "--save", str(box)])
    assert result.exit_code == 0, result.output
    assert all(words in result.output for words in ("Only the host was measured", "G parameters/s", str(box)))
    transformers.LlamaConfig(**SHAPE, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path / "model")
    planned = runner.invoke(app, ["plan", str(tmp_path / "model"), "--sequence-len", "32", "--hardware", str(box)])
    assert planned.exit_code == 0, planned.output
    assert "host probed on" in " ".join(planned.output.split())


def test_a_machines_file_has_the_budget_of_its_card(tmp_path: Path) -> None:
    """Context and allocator come off the memory of a card from a file as of one from the catalog."""
    from outsize.forecast.forecast import plan

    (tmp_path / "box.yaml").write_text(
        write_machine(Machine(spec=dataclasses.replace(CATALOG["rtx4090"], name="box"), measured={}))
    )
    config = transformers.LlamaConfig(**SHAPE, architectures=["LlamaForCausalLM"])
    budgets = [
        plan(config, sequence_len=32, hardware=name).plan.gpu_budget_bytes
        for name in ("rtx4090", str(tmp_path / "box.yaml"))
    ]
    assert budgets[0] == budgets[1] < 24 * 2**30


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--device", "sim:64MiB"], "--device sim:64MiB cannot be measured"),
        (["--save", "no/such/box.yaml"], "does not exist"),
        (["--save", "."], "is a folder"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_measured(args: list[str], words: str) -> None:
    result = runner.invoke(app, ["probe", *args])
    assert result.exit_code == 2 and words in result.stderr and result.stdout == ""


def test_a_machines_file_with_nonsense_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "box.yaml").write_text("name: box\ngpu_byte: 24GiB\n")
    result = runner.invoke(app, ["plan", str(tmp_path), "--hardware", str(tmp_path / "box.yaml")])
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert (
        "gpu_byte: unknown key; did you mean gpu_bytes?" in result.stderr
        and "flops: missing. Give a number such as 25.0e+9" in result.stderr
    )


def test_doctor_says_whether_the_machine_was_probed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTSIZE_CACHE", str(tmp_path))
    assert [f.state for f in doctor._probe()] == ["note"]

    class Card(CpuDevice):
        is_gpu = True
        identity = Identity(gpu="A Card", driver="1", torch="2", cores=3)

    monkeypatch.setattr("outsize.device.choose.choose_device", lambda: Card())
    assert [(f.state, "outsize probe" in f.text) for f in doctor._probe()] == [("note", True)]
    save_probe(
        Machine(spec=dataclasses.replace(lookup("rtx4090"), provenance="probed on 2026-11-16"), measured={}),
        Card.identity,
    )
    assert [(f.state, f.text) for f in doctor._probe()] == [("ok", "yes, plans take the rates probed on 2026-11-16")]
