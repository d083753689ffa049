"""Small quantized models: from transformers, and as outsize reads them."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from outsize.model.build import Built, build_model
from outsize.model.parts import named_parts
from outsize.model.weights import is_unmaterialized
from outsize.quant.settings import Quantization

BF16 = torch.bfloat16
CONFIG = dict(
    hidden_size=64, intermediate_size=144, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=96, max_position_embeddings=64, attention_bias=True,
)  # fmt: skip
"""Some weights have no whole number of blocks, for scales and for scales of scales."""
IDS = torch.arange(22).view(2, 11) * 3 % 96


def bf16_folder(folder: Path, kind: Any = transformers.LlamaForCausalLM, config: Any = None, **changes: Any) -> Path:
    torch.manual_seed(0)
    model = kind(config or transformers.LlamaConfig(**{**CONFIG, **changes})).to(BF16)
    for param in model.parameters():  # biases are zeros otherwise
        if param.ndim == 1:
            param.data += torch.randn_like(param) * 0.1
    model.save_pretrained(folder)
    return folder


def of_transformers(folder: Path, **settings: Any) -> Any:
    """As transformers reads it, in training mode: in eval mode bitsandbytes computes otherwise on some CPUs."""
    config = transformers.BitsAndBytesConfig(bnb_4bit_compute_dtype=BF16, **settings) if settings else None
    given = {} if config is None else {"quantization_config": config}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=BF16, device_map="cpu", **given)
    return model.train()


def materialized(built: Built) -> Any:
    """With the values of all parts, in the order in which an engine reads them."""
    with torch.no_grad():
        for name, part in named_parts(built.model):
            if is_unmaterialized(part):
                assert built.weights is not None
                data = torch.empty(part.shape, dtype=part.dtype)
                built.weights.read_into(name, data)
                part.data = data
    if built.weights is not None:
        built.weights.close()
    return built.model


def load(folder: Path, **settings: Any) -> Any:
    quantization = Quantization(**settings) if settings else None
    return materialized(build_model(str(folder), dtype=BF16, for_adapter=True, quantization=quantization))


def parts_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: part.detach() for name, part in named_parts(model)}


def assert_same_parts(mine: nn.Module, theirs: nn.Module) -> None:
    """The same names in the same order, with the same bytes."""
    ours, others = parts_of(mine), parts_of(theirs)
    assert list(ours) == list(others)
    for name, part in ours.items():
        other = others[name]
        assert part.dtype == other.dtype and part.shape == other.shape, name
        assert torch.equal(part.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)), name


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS).logits
    return found


def input_gradient(model: Any) -> Tensor:
    """Of the embeddings, through all layers."""
    model.requires_grad_(False)
    weight = model.get_input_embeddings().weight.requires_grad_()
    model(IDS, labels=IDS).loss.backward()
    found = weight.grad
    assert found is not None
    return found
