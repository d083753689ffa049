"""Sixty of Axolotl's example files, unchanged: each passes `outsize train --dry-run`, or is refused for what truly stands
in the way. Models and datasets are stand-ins (tests/axolotl_stubs.py).
"""

import io
import sys
from pathlib import Path

import axolotl_stubs
import pytest
from rich.console import Console

from outsize.base.errors import ConfigError
from outsize.config.read import read_config
from outsize.run.train import preview_run
from tools import axolotl_examples

PASS = [
    "LiquidAI/lfm2-350m-fft.yaml",
    "LiquidAI/lfm2-8b-a1b-lora.yaml",
    "archived/code-llama/7b/lora.yml",
    "archived/code-llama/13b/lora.yml",
    "archived/code-llama/34b/lora.yml",
    "archived/deepcoder/deepcoder-14B-preview-lora.yml",
    "archived/falcon/config-7b.yml",
    "archived/falcon/config-7b-lora.yml",
    "archived/openllama-3b/config.yml",
    "archived/openllama-3b/lora.yml",
    "archived/mpt-7b/config.yml",
    "archived/redpajama/config-3b.yml",
    "archived/pythia/lora.yml",
    "archived/qwen/qwen2-moe-lora.yaml",
    "archived/stablelm-2/1.6b/fft.yml",
    "archived/stablelm-2/1.6b/lora.yml",
    "archived/tiny-llama/lora-mps.yml",
    "archived/tiny-llama/lora.yml",
    "archived/tiny-llama/pretrain.yml",
    "deepcogito/cogito-v1-preview-llama-3B-lora.yml",
    "deepcogito/cogito-v1-preview-qwen-14B-lora.yml",
    "gemma4-unified/12b-text-lora.yaml",
    "granite4/granite-4.0-tiny-fft.yaml",
    "llama-2/fft_optimized.yml",
    "llama-2/lora.yml",
    "llama-3/fft-8b.yaml",
    "llama-3/instruct-dpo-lora-8b.yml",
    "llama-3/instruct-lora-8b.yml",
    "llama-3/lora-1b-deduplicate-dpo.yml",
    "llama-3/lora-1b-deduplicate-sft.yml",
    "llama-3/lora-1b-kernels.yml",
    "llama-3/lora-1b-sample-packing-sequentially.yml",
    "llama-3/lora-1b.yml",
    "llama-3/lora-8b.yml",
    "mamba/config.yml",
    "mistral/config.yml",
    "mistral/lora.yml",
    "mistral/mps/lora-mps.yml",
    "phi/lora-3.5.yaml",
    "phi/phi-ft.yml",
    "phi/phi2-ft.yml",
    "phi/phi3-ft.yml",
    "qwen2/dpo.yaml",
    "qwen3/8b-lora-fused-attn-compile.yaml",
    "qwen3/8b-lora-fused-attn.yaml",
    "shieldstral/shieldstral-3b-lora.yaml",
    "streaming/pretrain.yaml",
    "streaming/sft.yaml",
    "swanlab/lora-swanlab-profiling.yml",
]
QUANTIZED = ["llama-3/qlora-1b.yml", "mistral/qlora.yml", "phi/phi-qlora.yml", "qwen3/32b-qlora.yaml"]
"""They pass where bitsandbytes is installed."""

REFUSED = {
    # Several GPUs
    "llama-3/fft-8b-liger-fsdp.yaml": "fsdp fsdp_config",
    "phi/phi3-ft-fsdp.yml": "fsdp fsdp_config",
    "mistral/bigstral/bigstral-ds-zero3.yaml": "deepspeed",
    "llama-3/lora-1b-ray.yml": "deepspeed use_ray",
    "qwen2/adamw-pretrain-fsdp2.yaml": "fsdp_config",
    # Rewards
    "qwen2/prm.yaml": "process_reward_model",
    "qwen3/reward-model.yaml": "reward_model deepspeed",
}
"""The keys that are named."""


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return axolotl_examples.examples()
    except axolotl_examples.Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def stubbed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", axolotl_stubs.load_dataset)
    monkeypatch.setattr("outsize.data.sources.hub_answers", lambda *_, **__: True)
    for tracker in ("wandb", "swanlab"):
        (tmp_path / f"{tracker}.py").write_text("run = None\n")
        monkeypatch.delitem(sys.modules, tracker, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CI", "1")  # TRL reports its use to the hub, but not from CI
    return folder


def test_the_list_has_sixty_files_and_forty_five_of_them_pass() -> None:
    assert len([*PASS, *QUANTIZED, *REFUSED]) == 60 == len({*PASS, *QUANTIZED, *REFUSED})
    assert len(PASS) >= 45


@pytest.mark.full
@pytest.mark.parametrize("name", [*PASS, *QUANTIZED])
def test_a_file_of_axolotl_is_planned_unchanged(stubbed: Path, name: str) -> None:
    config = read_config(stubbed / name)
    if config.quantization is not None:
        pytest.importorskip("bitsandbytes")
    for model in {config.base_model, config.tokenizer_config} - {None}:
        axolotl_stubs.write_model(model, Path.cwd())
    console = Console(record=True, width=160, file=io.StringIO())
    preview_run(config, console)
    assert "bottleneck" in console.export_text()


@pytest.mark.full
@pytest.mark.parametrize("name", REFUSED)
def test_a_file_of_axolotl_is_refused_for_what_stands_in_the_way(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(folder / name)
    lines = str(caught.value).split("\n  ")[1:]
    assert [line.split(":")[0] for line in lines] == REFUSED[name].split()
