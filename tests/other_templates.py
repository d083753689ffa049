"""The chat templates of Axolotl and TRL, for tests/unit/data/test_other_templates.py. They are others': this file has
only their names and what is trained under each.

    python tests/other_templates.py

takes the templates from the source packages, which pip downloads, into a cache folder (`OUTSIZE_TEMPLATES`).
"""

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSIONS = {"axolotl": "0.19.0", "trl": "1.16.0"}
FOLDER = Path(os.environ.get("OUTSIZE_TEMPLATES", Path.home() / ".cache" / "outsize" / "chat_templates"))

NO_SYSTEM = ("gemma", "gemma_training")
"""Templates that refuse a system message."""

# What is trained of a turn: * is the content, ~ the content without the spaces around it. A pair: of turns before the
# last one, and of the last one.
TRAINED: dict[str, dict[str, str | tuple[str, str]]] = {
    "axolotl": {
        "alpaca": "*</s>",
        "aya": "~<|END_OF_TURN_TOKEN|>",
        "chatml": "*<|im_end|>\n",
        "cohere": "~<|END_OF_TURN_TOKEN|>",
        "command_a": "*<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        "command_a_rag": "<|START_RESPONSE|>*<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        "command_a_tool_use": "<|START_RESPONSE|>*<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        "deepseek_v2": "*</s>",
        "deepseek_v3": "*<｜end▁of▁sentence｜>",
        "exaone": "*[|endofturn|]\n",
        "exaone4": "*[|endofturn|]\n",
        "falcon_h1": "*<|im_end|>\n",
        "gemma": "~<end_of_turn>\n",
        "gemma3": "~<end_of_turn>\n",
        "gemma3n": "~<end_of_turn>\n",
        "gemma4": "~<turn|>\n",
        "gemma4_unified": "~<turn|>\n",
        "jamba": " *<|eom|>",
        "llama3": "~<|eot_id|>",
        "llama3_2_vision": "*<|eot_id|>",
        "llama4": "*<|eot|>",
        "llava": "* ",
        "metharme": ("~", "~</s>"),
        "mistral_v1": " *</s>",
        "mistral_v2v3": " ~</s>",
        "mistral_v3_tekken": "*</s>",
        "mistral_v7_tekken": "*</s>",
        "nemotron_h": "*<|im_end|>\n",
        "phi_3": "*<|end|>\n",
        "phi_35": "*<|end|>\n",
        "phi_4": "*<|im_end|>",
        "pixtral": "*</s>",
        "qwen2_vl": "*<|im_end|>\n",
        "qwen3": ("*<|im_end|>\n", "</think>\n\n*<|im_end|>\n"),
        "qwen3_5": ("*<|im_end|>\n", "</think>\n\n*<|im_end|>\n"),
        "qwen_25": "*<|im_end|>\n",
    },
    "trl": {
        "cohere": "~<|END_OF_TURN_TOKEN|>",
        "cohere2": "*<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        "cohere2_training": "*<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        "cohere_training": "~<|END_OF_TURN_TOKEN|>",
        "deepseek_r1_distill": "*<｜end▁of▁sentence｜>",
        "deepseek_r1_distill_training": "<｜Assistant｜>*<｜end▁of▁sentence｜>",
        "deepseekv3": "*<｜end▁of▁sentence｜>",
        "deepseekv3_training": "<｜Assistant｜>*<｜end▁of▁sentence｜>",
        "diffusion_gemma": "~<turn|>\n",
        "diffusion_gemma_training": "~<turn|>\n",
        "gemma": "~<end_of_turn>\n",
        "gemma3": "~<end_of_turn>\n",
        "gemma3_training": "~<end_of_turn>\n",
        "gemma4": "~<turn|>\n",
        "gemma4_v2": "~<turn|>\n",
        "gemma4_v3": "~<turn|>\n",
        "gemma4_v4": "~<turn|>\n",
        "gemma4_v5": "~<turn|>\n",
        "gemma_training": "~<end_of_turn>\n",
        "glm4moe": "\n<think></think>\n~",
        "glm4moe_training": "\n<think></think>\n~<|user|>",
        "gptoss": ("<|channel|>final<|message|>*", "<|channel|>final<|message|>*<|return|>"),
        "gptoss_training": (
            "<|start|>assistant<|channel|>final<|message|>*<|end|>",
            "<|start|>assistant<|channel|>final<|message|>*<|return|>",
        ),
        "idefics3": " *<end_of_utterance>\n",
        "idefics3_training": " *<end_of_utterance>\n",
        "lfm2": "*<|im_end|>\n",
        "lfm2_2_5": "*<|im_end|>\n",
        "lfm2_2_5_v2": "*<|im_end|>\n",
        "lfm2_2_5_vl": "*<|im_end|>\n",
        "lfm2_training": "*<|im_end|>\n",
        "lfm2_v2": "*<|im_end|>\n",
        "lfm2_v2_training": "*<|im_end|>\n",
        "llama3": "~<|eot_id|>",
        "llama3_1": "~<|eot_id|>",
        "llama3_2": "~<|eot_id|>",
        "llama3_training": "~<|eot_id|>",
        "llava_next": " *</s> ",
        "llava_next_training": " *</s>",
        "muse_glimmer": " to=user<|message|>*<|eot|>",
        "muse_glimmer_training": "<|start|>assistant to=user<|message|>*<|eot|>",
        "nemotron_3_5_lightning": "</think>~<|im_end|>\n",
        "nemotron_3_5_lightning_training": "<think></think>~<|im_end|>\n",
        "nemotron_3_nano": "</think>~<|im_end|>\n",
        "nemotron_3_nano_training": "<think></think>~<|im_end|>\n",
        "nemotron_3_super": "</think>~<|im_end|>\n",
        "nemotron_3_super_training": "<think></think>~<|im_end|>\n",
        "nemotron_3_ultra": "</think>~<|im_end|>\n",
        "nemotron_3_ultra_training": "<think></think>~<|im_end|>\n",
        "phi3": ("*<|end|>\n", "*<|end|>\n</s>"),
        "phi3_5": ("*<|end|>\n", "*<|end|>\n</s>"),
        "phi3_5_training": ("*<|end|>\n", "*<|end|>\n</s>"),
        "phi3_training": ("*<|end|>\n", "*<|end|>\n</s>"),
        "qwen2_5": "*<|im_end|>\n",
        "qwen2_5_training": "\n*<|im_end|>\n",
        "qwen2_5_vl": "*<|im_end|>\n",
        "qwen2_5_vl_training": "*<|im_end|>\n",
        "qwen3": ("*<|im_end|>\n", "<think>\n\n</think>\n\n*<|im_end|>\n"),
        "qwen3_5_nothink": "~<|im_end|>\n",
        "qwen3_5_nothink_training": "<think>\n\n</think>\n\n~<|im_end|>\n",
        "qwen3_5_think": ("~<|im_end|>\n", "\n</think>\n\n~<|im_end|>\n"),
        "qwen3_5_think_training": "<think>\n\n</think>\n\n~<|im_end|>\n",
        "qwen3_6": ("~<|im_end|>\n", "\n</think>\n\n~<|im_end|>\n"),
        "qwen3_6_training": "<think>\n\n</think>\n\n~<|im_end|>\n",
        "qwen3_8": "\n</think>\n\n~<|im_end|>\n",
        "qwen3_8_training": "<think>\n\n</think>\n\n~<|im_end|>\n",
        "qwen3_instruct_2507": "*<|im_end|>\n",
        "qwen3_instruct_2507_training": "*<|im_end|>\n",
        "qwen3_training": "<think>\n\n</think>\n\n*<|im_end|>\n",
        "qwen3_vl": "*<|im_end|>\n",
        "qwen3_vl_training": "*<|im_end|>\n",
        "smolvlm": " *<end_of_utterance>\n",
        "smolvlm_training": " *<end_of_utterance>\n",
    },
}


def path_of(package: str, name: str) -> Path:
    return FOLDER / f"{package}-{VERSIONS[package]}" / f"{name}.jinja"


def extract() -> None:
    """Fill the cache folder, unless it is filled."""
    for package, version in VERSIONS.items():
        if all(path_of(package, name).exists() for name in TRAINED[package]):
            continue
        with tempfile.TemporaryDirectory() as folder:
            wanted = ["--no-deps", "--no-binary", ":all:", "--dest", folder, f"{package}=={version}"]
            subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *wanted], check=True)
            (archive,) = Path(folder).glob("*.tar.gz")
            with tarfile.open(archive) as files:
                for member in files:
                    path = Path(member.name)
                    if (
                        path.suffix == ".jinja"
                        and "chat_templates" in path.parts
                        and (file := files.extractfile(member))
                    ):
                        path_of(package, path.stem).parent.mkdir(parents=True, exist_ok=True)
                        path_of(package, path.stem).write_bytes(file.read())


if __name__ == "__main__":
    extract()
