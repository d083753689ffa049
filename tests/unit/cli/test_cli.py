"""The commands as a user meets them: output, exit codes, files."""

import gc
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import folders
import pytest
import transformers
from typer.testing import CliRunner

import outsize
from outsize.cli import doctor as doctor_module
from outsize.cli.doctor import Finding
from outsize.cli.main import app
from outsize.hardware.catalog import lookup
from outsize.hardware.host import container_limit
from outsize.native import library
from outsize.optim import native
from outsize.schedule.check import load

runner = CliRunner()
SHAPE = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=64,
)


@pytest.fixture
def model(tmp_path: Path, one_trace: None) -> str:
    folder = tmp_path / "model"
    transformers.LlamaConfig(**SHAPE, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return str(folder)


def test_help_needs_no_torch() -> None:
    code = "import sys, outsize.cli.main; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    source = str(Path(doctor_module.__file__).parents[2])
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert result.stdout.strip() == "[]"


def test_a_wrong_path_is_reported_before_imports_that_take_seconds(tmp_path: Path) -> None:
    data, wrong = folders.write_text(tmp_path / "data.jsonl", 2), str(tmp_path / "none")
    run = "base_model: {}\ndatasets: [{{path: {}}}]\nsequence_len: 8\n"
    (tmp_path / "model.yaml").write_text(run.format(wrong, data))
    (tmp_path / "data.yaml").write_text(run.format(tmp_path, f"{wrong}.jsonl"))
    commands = {
        ("train", str(tmp_path / "model.yaml")): f"ConfigError: {wrong}: there is no such folder. Correct the path",
        ("train", str(tmp_path / "data.yaml")): f"ConfigError: datasets: there is no file or folder {wrong}.jsonl.",
        ("train", str(data)): f"ConfigError: {data}: it looks like data, not a run file. Name a YAML file",
        ("train", str(tmp_path)): f"ConfigError: {tmp_path}: it is a folder, not a run file. Name a YAML file",
        ("plan", str(tmp_path / "model.yaml")): f"ConfigError: {wrong}: there is no such folder. Correct the path",
        ("plan", wrong): f"ConfigError: {wrong}: there is no such folder. Correct the path",
        ("chat", wrong): f"ConfigError: {wrong}: there is no such folder. Name a checkpoint",
        ("export", wrong, "to"): f"ConfigError: {wrong}: there is no such folder. Name a checkpoint",
    }
    code = (
        "import json, sys\nfrom typer.testing import CliRunner\nfrom outsize.cli.main import app\n"
        "results = [CliRunner().invoke(app, args) for args in json.loads(sys.argv[1])]\n"
        "print(json.dumps([[r.exit_code, r.stderr] for r in results] + [['torch' in sys.modules]]))"
    )
    source = str(Path(doctor_module.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(list(commands))],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": source},
    )
    *results, [has_torch] = json.loads(done.stdout)
    for (exit_code, stderr), expected in zip(results, commands.values(), strict=True):
        assert exit_code == 2 and expected in stderr
    assert not has_torch


def test_the_package_runs_as_a_module_and_lists_its_public_names() -> None:
    source = str(Path(doctor_module.__file__).parents[2])
    result = subprocess.run(
        [sys.executable, "-m", "outsize", "--version"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert result.stdout == f"outsize {outsize.__version__}\n"
    assert set(outsize.__all__) <= set(dir(outsize))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--help"], ["plan", "doctor"]),
        (["plan", "--help"], ["Examples", "--hardware"]),
        (["doctor", "--help"], ["exit code"]),
    ],
)
def test_help_shows_what_to_type(args: list[str], words: list[str]) -> None:
    result = runner.invoke(app, args)
    assert result.exit_code == 0
    assert all(word in result.output for word in words)


def test_plan_of_a_run_file_is_for_its_model_adapter_data_and_budgets(tmp_path: Path) -> None:
    adapter = dict(adapter="lora", lora_r=2, lora_target_linear=True)
    yaml = folders.write_run(
        tmp_path, kind="one-block", device="sim:1MiB", host_memory="1GiB", sequence_len=96, **adapter
    )
    result = runner.invoke(app, ["plan", str(yaml), "--gpu-memory", "1000KiB", "--set", "micro_batch_size=3"])
    assert result.exit_code == 0, result.output + result.stderr
    assert "input_ids 3×47" in result.output and "2 micro-batches a step" in result.output
    assert "planned for 47 tokens, the longest row of the data; sequence_len is 96" in result.output
    assert "of 0.98 MiB" in result.output and "of 1.00 GiB" in result.output and "trainable, on 1MiB" in result.output
    dry = runner.invoke(app, ["train", str(yaml), "--dry-run", "--set", "micro_batch_size=3"])
    gpu = [re.search(r"(?m)^(?:│ )?GPU .* (\S+ \S+) of ", out).group(1) for out in (result.output, dry.output)]
    assert gpu[0] == gpu[1], "masks of padding included"
    refused = runner.invoke(app, ["plan", str(yaml), "--accumulate", "2"])
    assert refused.exit_code == 2 and "--accumulate" in refused.stderr and "--set" in refused.stderr


@pytest.mark.full
def test_plan_of_a_quantized_run_is_the_plan_that_the_run_makes(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    qlora = dict(adapter="qlora", load_in_4bit=True, lora_r=2, lora_target_linear=True, pad_to_sequence_len=True)
    yaml = folders.write_run(tmp_path, device="sim:215KiB", host_memory="1GiB", **qlora)
    texts = [runner.invoke(app, [*args, str(yaml)]).output for args in (["plan"], ["train", "--dry-run"])]
    lines = [re.findall(r"(?m)^(?:│ )?(?:GPU|host) .* (\S+ \S+ of \S+ \S+) ", text) for text in texts]
    assert len(lines[0]) == 2 and lines[0] == lines[1]


def test_plan_why_shows_what_4_bits_save_an_adapter(model: str) -> None:
    pytest.importorskip("bitsandbytes")
    args = ["--sequence-len", "32", "--adapter", "lora", "--lora-r", "2"]
    result = runner.invoke(app, ["plan", model, "--why", *args])
    assert result.exit_code == 0, result.output
    assert re.fullmatch(r"4-bit     weights \S+ \S+ instead of .* \(\d+% (less|more); .*\)", last_line(result.output))
    result = runner.invoke(app, ["plan", model, "--why", "--load-in-4bit", *args])
    assert result.exit_code == 0 and last_line(result.output).startswith("minimum")


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def test_plan_says_what_lora_needs_where_full_training_does_not_fit(tmp_path: Path) -> None:
    wide = SHAPE | dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=1)
    transformers.LlamaConfig(**wide, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    args = ["plan", str(tmp_path), "--hardware", "64MiB", "--seq", "8", "--host-memory", "1GiB", "--gpu-memory"]
    result = runner.invoke(app, [*args, "9MiB"])
    assert result.exit_code == 2 and "It fits with LoRA (--adapter lora --lora-r 16" in result.stderr, result.stderr
    assert "note: 64MiB is an invented machine" in result.stderr
    result = runner.invoke(app, [*args, "1MiB"])
    assert result.exit_code == 2 and "does not fit either" in result.stderr


def test_plan_explains_its_lines() -> None:
    result = runner.invoke(app, ["plan", "--legend"])
    assert result.exit_code == 0 and all(word in result.output for word in ("recompute", "bottleneck", "slots"))


def test_plan_prints_a_table_and_saves_what_it_prints(model: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    args = [
        "--hardware",
        "1MiB",
        "--sequence-len",
        "32",
        "--micro-batch-size",
        "3",
        "--gpu-memory",
        "512KiB",
        "--accumulate",
        "2",
        "--host-memory",
        "1GiB",
    ]
    result = runner.invoke(app, ["plan", model, *args, "--save", str(path)])
    assert result.exit_code == 0, result.output
    assert (
        "model.layers.0" in result.output
        and "input_ids 3×32" in result.output
        and "2 micro-batches a step" in result.output
    )
    assert "machine 1MiB: 1.00 MiB GPU, 1.00 GiB host memory" in result.output
    assert "faster  gradient_accumulation_steps 8: " in result.output
    made = load(path)
    assert (made.gpu_budget_bytes, made.host_budget_bytes, made.step_config.accumulate) == (512 * 2**10, 2**30, 2)
    assert made.inputs["input_ids"] == (3, 32)
    short = {"--sequence-len": "--seq", "--micro-batch-size": "--micro-batch"}
    again = runner.invoke(app, ["plan", model, *(short.get(word, word) for word in args)])
    assert again.exit_code == 0 and result.output.startswith(again.output)


def test_plan_shows_the_gain_from_more_memory_and_the_minimum(model: str) -> None:
    result = runner.invoke(app, ["plan", model, "--sequence-len", "32", "--update", "in-backward"])
    assert result.exit_code == 0, result.output
    more, least = result.output.strip().splitlines()[-2:]
    assert more.startswith("more    4.00 GiB more GPU memory: ") and "smallest machine of the catalog: rtx3090" in least


def test_plan_why_shows_common_recipes_and_the_gain_from_a_better_machine(model: str) -> None:
    result = runner.invoke(
        app, ["plan", model, "--why", "--sequence-len", "32", "--hardware", "512KiB", "--host-memory", "1GiB"]
    )
    assert result.exit_code == 0, result.output
    assert all(
        words in result.output
        for words in ("recipes   everything on the GPU", "upgrades  4.00 GiB more", "copies twice as fast", "minimum  ")
    )
    assert runner.invoke(app, ["plan", model, "--update", "sometimes"]).exit_code == 2


def test_plan_writes_a_page_and_a_trace(model: str, tmp_path: Path) -> None:
    page, trace = tmp_path / "report.html", tmp_path / "lanes.json"
    args = [
        "--hardware",
        "1MiB",
        "--sequence-len",
        "32",
        "--gpu-memory",
        "512KiB",
        "--html",
        str(page),
        "--trace",
        str(trace),
    ]
    result = runner.invoke(app, ["plan", model, *args])
    assert result.exit_code == 0, result.output
    assert str(page) in result.output and str(trace) in result.output
    assert "<h1>model <span" in page.read_text(), "it is called what its folder is"
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"forward of model.layers.0", "backward of head"} <= {
        event["args"]["what"] for event in events if event["ph"] == "X"
    }


def test_plan_compares_machines_in_one_line_each(model: str) -> None:
    result = runner.invoke(app, ["plan", model, "--sequence-len", "32", "--hardware", "rtx4090, 1MiB,4KiB"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.strip().splitlines()
    assert [line.split()[0] for line in lines[:1] + lines[2:5]] == ["machine", "rtx4090", "1MiB", "4KiB"]
    assert "tokens/s" in lines[0] and "does not fit" in lines[4]
    assert lines[6:8] == [
        "rates of rtx4090: estimated from the datasheet",
        f"rates of 1MiB: {lookup('1MiB').provenance}",
    ]
    assert lines[8].startswith("4KiB: gpu_memory 4 KiB is too small: "), "the whole sentence follows"
    assert runner.invoke(app, ["plan", model, "--sequence-len", "32", "--hardware", "4KiB,2KiB"]).exit_code == 2


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--hardware", "rtx9999"], "ConfigError: hardware 'rtx9999' is unknown"),
        (
            ["--hardware", "rtx4090,h100", "--save", "plan.json"],
            "--hardware names 2 machines, but --save is for one plan",
        ),
        (["--hardware", "rtx4090,h100", "--html", "report.html"], "--html is for one plan"),
        (["--hardware", "rtx4090,h100", "--trace", "lanes.json"], "--trace is for one plan"),
        (["--html", "no/such/folder/report.html"], "does not exist. Name a file in an existing folder"),
        (["--html", "."], "--html: . is a folder"),
        (["--hardware", "rtx4090,rtx9999"], "ConfigError: hardware 'rtx9999' is unknown"),
        (["--batch-size", "10", "--micro-batch", "3"], "10 is divided by 1, 2, 5, 10"),
        (["--hardware", "8KiB", "--sequence-len", "32"], "PlanInfeasible: "),
        (["--save", "no/such/folder/plan.json"], "does not exist. Name a file in an existing folder"),
        (["--gpu-memory", "24GB"], "use GiB"),
    ],
)
def test_our_errors_are_sentences_with_exit_code_2(args: list[str], words: str, model: str) -> None:
    result = runner.invoke(app, ["plan", model, *args])
    assert result.exit_code == 2
    assert words in result.stderr and "Traceback" not in result.output
    assert result.stdout == ""


def test_plan_leaves_garbage_collection_as_it_was(model: str) -> None:
    before = gc.get_threshold()
    runner.invoke(app, ["plan", model, "--hardware", "none"])
    assert gc.get_threshold() == before


def test_doctor_is_well_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    native.find_kernel()  # compiled into the usual cache, if it has to be
    monkeypatch.setenv("OUTSIZE_CACHE", str(tmp_path))
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "same bits as plain PyTorch" in result.output and "Ready." in result.output
    assert str(tmp_path) in result.output and not list(tmp_path.iterdir()), "the self-test leaves nothing behind"


def test_doctor_shows_everything_and_fails_when_something_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> None:
        raise RuntimeError("libsomething.so [is] not there")

    checks = {
        "first": lambda: iter([Finding("ok", "fine")]),
        "second": breaks,
        "third": lambda: iter([Finding("note", "[still] looked at")]),
    }
    monkeypatch.setattr(doctor_module, "CHECKS", checks)
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert (
        "RuntimeError: libsomething.so [is] not there" in result.output
        and "[still] looked at" in result.output
        and "Ready" not in result.output
    )


def test_a_torchvision_of_another_torch_is_named_by_doctor_and_by_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers raises its own error, from the one that torchvision raised."""

    def breaks(*_: object) -> None:
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module 'TrainerCallback'.") from error

    monkeypatch.setattr("outsize.config.read.read_config", breaks)
    result = runner.invoke(app, ["train", "run.yaml"])
    assert result.exit_code == 2 and "pip install torch torchvision --index-url" in result.stderr, result.output
    monkeypatch.setattr(doctor_module, "CHECKS", {"libraries": breaks})
    assert "pip uninstall torchvision" in runner.invoke(app, ["doctor"]).output


def test_errors_of_our_own_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr("outsize.config.read.read_config", breaks)
    assert isinstance(runner.invoke(app, ["train", "run.yaml"]).exception, RuntimeError)


def test_doctor_finds_a_wrong_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test finds a reference with a slightly different decay."""
    from outsize import reference

    honest = reference.AdamW.__init__
    monkeypatch.setattr(
        reference.AdamW, "__init__", lambda self, params, **how: honest(self, params, **{**how, "weight_decay": 0.02})
    )
    monkeypatch.setattr(doctor_module, "CHECKS", {"self-test": doctor_module._self_test})
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1 and "differ" in result.output


def test_an_unwritable_cache_is_broken_and_none_is_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    monkeypatch.setenv("OUTSIZE_CACHE", str(tmp_path / "deeper" / "still"))
    assert [f.state for f in doctor_module._cache()] == ["broken"]
    monkeypatch.setenv("OUTSIZE_CACHE", "")
    assert [f.state for f in doctor_module._cache()] == ["note"]


def test_the_tightest_limit_of_a_container_counts(tmp_path: Path) -> None:
    own = tmp_path / "own"
    (tmp_path / "v2" / "pod" / "box").mkdir(parents=True)
    own.write_text("0::/pod/box\n")
    assert container_limit(tmp_path / "v2", own) is None
    (tmp_path / "v2" / "pod" / "box" / "memory.max").write_text("max\n")
    (tmp_path / "v2" / "pod" / "memory.max").write_text(f"{8 * 2**30}\n")
    assert container_limit(tmp_path / "v2", own) == 8 * 2**30
    (tmp_path / "v1" / "memory").mkdir(parents=True)
    (tmp_path / "v1" / "memory" / "memory.limit_in_bytes").write_text(f"{4 * 2**30}\n")
    own.write_text("5:cpu,cpuacct:/x\n4:memory:/docker/0123\n")  # the host's path, which is not visible here
    assert container_limit(tmp_path / "v1", own) == 4 * 2**30
    (tmp_path / "v1" / "memory" / "memory.limit_in_bytes").write_text(
        "9223372036854771712\n"
    )  # version 1 says "no limit" so
    assert container_limit(tmp_path / "v1", own) is None


def test_doctor_names_a_missing_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CC", "OUTSIZE_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(library, "packaged", lambda source: None)  # no library that was compiled with the package
    native.find_kernel.cache_clear()
    try:
        (finding,) = doctor_module.CHECKS["C compiler"]()
    finally:
        native.find_kernel.cache_clear()
    assert finding.state == "note" and "no C compiler found. Install one" in finding.text
