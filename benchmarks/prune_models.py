"""Folders with models of random weights, text and run files, for `benchmarks.prune`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor, nn

from benchmarks.shapes import named_config
from outsize.checkpoint.tensorfile import TensorFile, TensorSpec
from outsize.config.read import read_config
from outsize.config.run import RunConfig
from outsize.model.build import trainable_class

_WORDS = 1000


def model_folder(
    folder: Path, shape: str, *, layers: int | None = None, real: Sequence[int] | None = None, **sizes: int
) -> Path:
    """A folder that is made once: a file of weights per layer, drawn on the GPU if there is one.

    `layers`: instead of all. `real`: only these layers have values; the files of the others have zeros that take no
    space on disk. `sizes`: other values of the config.
    """
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = named_config(shape)
    for name, value in {**sizes, **({"num_hidden_layers": layers} if layers is not None else {})}.items():
        setattr(config, name, value)
    with torch.device("meta"):
        model: Any = trainable_class(config)._from_config(config, dtype=torch.bfloat16)
    files: dict[str, dict[str, Tensor]] = {}
    for name, param in _parameters(model).items():
        number = name.split(".")[2] if ".layers." in name else ""
        files.setdefault(f"layer-{number}.safetensors" if number else "rest.safetensors", {})[name] = param
    index: dict[str, str] = {}
    for file, params in files.items():
        number = file.removeprefix("layer-").removesuffix(".safetensors")
        has_values = real is None or not number.isdigit() or int(number) in real
        specs = {name: TensorSpec(param.dtype, tuple(param.shape)) for name, param in params.items()}
        with TensorFile.create(folder / file, specs, {"format": "pt"}) as written:
            for name, param in params.items() if has_values else ():
                written.write(name, _drawn(param))
        index |= dict.fromkeys(params, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    _write_tokenizer(folder)
    config.architectures = [type(model).__name__]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    return folder


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    """Without tied ones, which building on meta has made two of."""
    params: dict[str, Tensor] = dict(model.named_parameters())
    if model.config.tie_word_embeddings:  # type: ignore[union-attr]
        params.pop("lm_head.weight", None)
    return params


def _drawn(param: Tensor) -> Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if param.dim() == 1:  # norms
        return torch.ones(param.shape, dtype=param.dtype, device=device)
    return torch.empty(param.shape, dtype=param.dtype, device=device).normal_(std=0.02)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"</s>": 0, "<pad>": 1} | {f"w{number}": number + 2 for number in range(_WORDS)}
    inner = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="</s>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="<pad>")
    made.save_pretrained(folder)


def run_config(folder: Path, model: Path, *, rows: int, seq: int, tokens: int, **keys: Any) -> RunConfig:
    """A run file below `folder`, with random text of at least this many tokens in full rows."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = np.random.default_rng(0).integers(0, _WORDS, (max(rows, -(-tokens // seq)), seq - 1))
    lines = [json.dumps({"text": " ".join(f"w{number}" for number in row)}) for row in numbers]
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    given = {
        "base_model": str(model),
        "datasets": [str(folder / "text.jsonl")],
        "sequence_len": seq,
        "micro_batch_size": rows,
        "gradient_accumulation_steps": 1,
        "output_dir": str(folder / "out"),
        **keys,
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in given.items() if value is not None}))
    return read_config(path)
