"""Whole runs of `outsize train` on a GPU, from weights on disk: loss by step, GPU and host memory, seconds.

    PYTHONPATH=src python -m benchmarks.runs full --work /some/disk --out results.json
        7B shape under 24 GiB, killed after its save, resumed under 40 GiB
    PYTHONPATH=src python -m benchmarks.runs lora --work /some/disk --out results.json
        8B shape with LoRA, under 8 GiB and resident

Weights are random; the text is the demo's. Memory is measured with nvidia-smi and /proc.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import init_empty_weights
from transformers import LlamaConfig, LlamaForCausalLM

from examples.demo import byte_tokenizer, read_text
from outsize.checkpoint.model_files import model_files, write_configs
from outsize.checkpoint.tensorfile import TensorFile

SHAPES = {
    "7b": dict(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32000,
    ),
    "8b": dict(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    ),
    "tiny": dict(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=512,
    ),
}
STEP = re.compile(r"step (\d+)/\d+: loss ([\d.naninf]+), ([\d,]+) tokens/s")


def write_model(folder: Path, shape: str) -> None:
    """bf16 safetensors as save_pretrained would write them, one tensor at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        **SHAPES[shape],
        tie_word_embeddings=False,
        max_position_embeddings=8192,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    with init_empty_weights(include_buffers=False):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    files = model_files(model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    for name, specs in files.files.items():
        with TensorFile.create(folder / name, specs, {"format": "pt"}) as file:
            for key, spec in specs.items():
                norm = key.endswith("norm.weight")
                value = (
                    torch.ones(spec.shape)
                    if norm
                    else torch.randn(spec.shape, generator=generator, device=device) * 0.02
                )
                file.write(key, value.to(spec.dtype))
    byte_tokenizer().save_pretrained(folder)
    write_configs(model, folder, files)


def have_model(folder: Path, shape: str) -> None:
    """In a separate process, whose GPU memory is freed at its end."""
    if not (folder / "config.json").exists():
        subprocess.run(
            [
                sys.executable,
                "-m",
                "benchmarks.runs",
                "write",
                "--work",
                str(folder),
                "--shape",
                shape,
                "--out",
                os.devnull,
            ],
            check=True,
        )


class Watch:
    """Peak memory of a process, seen from outside, and its lines."""

    def __init__(
        self, command: list[str], *, kill_after: str | None = None, at_first_step: Callable[[], Any] | None = None
    ):
        self.started = time.perf_counter()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1)
        self.gpu_mib = self.trial_gpu_mib = self.host_kib = 0
        self.lines: list[tuple[float, str]] = []
        threading.Thread(target=self._poll, daemon=True).start()
        for line in self.process.stdout or ():
            self.lines.append((time.perf_counter() - self.started, line.rstrip()))
            print(f"{self.lines[-1][0]:7.1f} {line.rstrip()[:200]}", flush=True)
            if not self.trial_gpu_mib and STEP.search(line):
                self.trial_gpu_mib, self.gpu_mib = self.gpu_mib, 0  # what the profiling run took is told apart
                if at_first_step is not None:
                    at_first_step()
            if kill_after is not None and kill_after in line:
                self.process.send_signal(signal.SIGKILL)
        self.returncode = self.process.wait()
        self.seconds = time.perf_counter() - self.started

    def _poll(self) -> None:
        smi = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while self.process.poll() is None:
            try:
                status = Path(f"/proc/{self.process.pid}/status").read_text()
                self.host_kib = max(self.host_kib, int((re.findall(r"VmHWM:\s+(\d+)", status) or ["0"])[0]))
            except OSError:
                pass
            if shutil.which("nvidia-smi"):
                used = subprocess.run(smi, capture_output=True, text=True).stdout.split()
                self.gpu_mib = max(self.gpu_mib, *(int(x) for x in used), 0)
            time.sleep(0.5)

    def facts(self) -> dict[str, Any]:
        steps = [(round(at, 1), int(m[1]), m[2], m[3]) for at, line in self.lines if (m := STEP.search(line))]
        return {
            "seconds": round(self.seconds, 1),
            "returncode": self.returncode,
            "gpu_gib": round(self.gpu_mib / 1024, 2),
            "gpu_gib_before_step_2": round(self.trial_gpu_mib / 1024, 2),
            "host_gib": round(self.host_kib / 2**20, 1),
            "steps": steps,
        }


def train(
    run: Path,
    *overrides: str,
    kill_after: str | None = None,
    at_first_step: Callable[[], Any] | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "outsize.cli.main",
        "train",
        str(run),
        *(x for o in overrides for x in ("--set", o)),
        *(["--resume"] if resume else []),
    ]
    return Watch(command, kill_after=kill_after, at_first_step=at_first_step).facts()


def write_run(work: Path, model: Path, **keys: Any) -> Path:
    (work / "text.txt").write_text(read_text())
    path = work / "run.yaml"
    base = {
        "base_model": str(model),
        "datasets": [str(work / "text.txt")],
        "output_dir": str(work / "out"),
        "lr_scheduler": "constant",
        "seed": 0,
    }
    path.write_text(yaml.safe_dump({**base, **keys}, sort_keys=False))
    return path


def _unlink(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink()


def full(work: Path, shape: str, small: str, large: str) -> dict[str, Any]:
    started = time.perf_counter()
    have_model(work / shape, shape)
    written = time.perf_counter() - started
    run = write_run(
        work,
        work / shape,
        sequence_len=1024,
        micro_batch_size=2,
        max_steps=13,
        learning_rate=1e-5,
        save_steps=10,
        full_determinism=True,
    )
    # Once the weights are in their homes their files are not needed: the checkpoint holds them again. That is room on a
    # small disk.
    first = train(
        run,
        f"gpu_memory={small}",
        kill_after="step 12/",
        at_first_step=lambda: _unlink((work / shape).glob("*.safetensors")),
    )
    left = sorted(p.name for p in (work / "out").iterdir())
    second = train(run, f"gpu_memory={large}", "max_steps=12", "save_strategy=no", "save_steps=null", resume=True)
    exported = {p.name: p.stat().st_size for p in sorted((work / "out").iterdir()) if p.is_file()}
    saved = {p.name: p.stat().st_size for p in sorted((work / "out" / "checkpoint-10").iterdir())}
    same = [s[1:3] for s in first["steps"] if s[1] > 10] == [s[1:3] for s in second["steps"]]
    return {
        "wrote_model_seconds": round(written, 1),
        "killed": first,
        "left": left,
        "resumed": second,
        "same_losses": same,
        "checkpoint": saved,
        "export": exported,
    }


def lora(work: Path, shape: str, small: str, large: str) -> dict[str, Any]:
    have_model(work / shape, shape)
    run = write_run(
        work,
        work / shape,
        sequence_len=2048,
        micro_batch_size=1,
        gradient_accumulation_steps=4,
        max_steps=6,
        learning_rate=1e-4,
        save_strategy="no",
        adapter="lora",
        lora_r=16,
        lora_alpha=32,
        lora_target_linear=True,
    )
    return {budget: train(run, f"gpu_memory={budget}", f"output_dir={work / budget}") for budget in (small, large)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("full", "lora", "write"))
    parser.add_argument(
        "--work", type=Path, required=True, help="A folder with room: a full checkpoint is 12 bytes a parameter."
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--budgets", nargs=2, metavar=("SMALL", "LARGE"))
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    if asked.what == "write":
        write_model(asked.work, asked.shape)
        sys.exit()
    print(f"{shutil.disk_usage(asked.work).free / 2**30:.1f} GiB free, {os.cpu_count()} cores", flush=True)
    run_it, shape, budgets = (
        (full, "7b", ("24GiB", "40GiB")) if asked.what == "full" else (lora, "8b", ("8GiB", "100GiB"))
    )
    result = run_it(asked.work, asked.shape or shape, *(asked.budgets or budgets))
    gpu = (
        subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.strip()
        if shutil.which("nvidia-smi")
        else "none"
    )
    asked.out.write_text(
        json.dumps(
            {"what": asked.what, "gpu": gpu, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), **result},
            indent=1,
        )
    )
    print(json.dumps(result)[:2000])
