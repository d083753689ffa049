"""Quantized bases with LoRA adapters, made in memory, for tests. Their libraries are optional. torchao is not in the
extra `dev`: where it is installed, importing PEFT takes seconds longer and prints to stderr.
"""

import copy
import dataclasses
import functools
import logging
from typing import Any, Literal

import cells
import pytest
import torch
from cells import Outcome, Traced
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import outsize
from outsize.device.sim import SimDevice
from outsize.hardware.catalog import lookup
from outsize.model.discover import find_layers
from outsize.profile import cache
from outsize.quant import settings
from outsize.quant.reading import quantize_in_memory
from outsize.quant.weight_only import Fp8Linear

VOCAB, TOKENS = 128, 32
CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=VOCAB,
    max_position_embeddings=64,
    attention_bias=True,
    attention_dropout=0.1,
)
Quantization = Literal["nf4-double", "nf4", "fp4", "torchao-int8", "int8", "fp8"]
PART_NAMES = {
    "nf4-double": (".absmax", ".nested_absmax", ".nested_offset"),
    "nf4": (".absmax",),
    "fp4": (".absmax", ".nested_absmax", ".nested_offset"),
    "torchao-int8": (".qdata", ".scale", ".zero_point"),
    "int8": (".SCB",),
    "fp8": (".weight_scale_inv",),
}
"""Ends of the names of what a quantized weight has beside its packed bytes."""


def _to_4bit(model: nn.Module, quant_type: str, *, double: bool) -> None:
    import bitsandbytes as bnb

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    for path, module in list(model.named_modules()):
        if type(module) is not nn.Linear:
            continue
        made = bnb.nn.Linear4bit(
            module.in_features,
            module.out_features,
            bias=module.bias is not None,
            compute_dtype=torch.bfloat16,
            compress_statistics=double,
            quant_type=quant_type,
        )
        made.weight.data = module.weight.data
        made.bias = module.bias
        made.support_avx512bf16_for_cpu = False  # a plain model would repack its weights in eval mode, with other bits
        model.set_submodule(path, made.to("cpu"))


def _to_fp8(model: nn.Module) -> None:
    """In blocks of 48 × 32; the last rows of some weights are no whole block."""
    for path, module in list(model.named_modules()):
        if type(module) is not nn.Linear:
            continue
        rows, columns = module.weight.shape
        made = Fp8Linear(
            columns, rows, bias=module.bias, block=(48, 32), scale_dtype=torch.float32, compute_dtype=torch.bfloat16
        )
        padded = F.pad(module.weight.detach().float(), (0, 0, 0, -rows % 48))
        scale = padded.unflatten(1, (-1, 32)).unflatten(0, (-1, 48)).abs().amax((1, 3)) / 448
        codes = padded / scale.repeat_interleave(48, 0).repeat_interleave(32, 1)
        made.weight = nn.Parameter(codes[:rows].to(torch.float8_e4m3fn), requires_grad=False)
        made.weight_scale_inv = nn.Parameter(scale, requires_grad=False)
        model.set_submodule(path, made)


def quantize(model: nn.Module, quantization: Quantization) -> None:
    """Quantize all linear layers of a module in place."""
    if quantization == "torchao-int8":
        torchao = pytest.importorskip("torchao.quantization")  # skips the tests that need it
        torchao.quantize_(model.requires_grad_(False), torchao.Int8WeightOnlyConfig())
    elif quantization == "int8":
        quantize_in_memory(model, settings.Quantization(load_in_8bit=True))
    elif quantization == "fp8":
        _to_fp8(model)
    else:
        _to_4bit(model, quantization.partition("-")[0], double=quantization != "nf4")


def unquantized() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(copy.deepcopy(CONFIG)).to(torch.bfloat16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantized:
    """A Llama with a quantized base and bf16 LoRA adapters; embeddings, head and norms stay bf16."""

    quantization: Quantization
    is_fused: bool = False
    """Its LoRA layers and MLPs run as outsize.fuse_lora makes them."""

    @property
    def spec(self) -> outsize.AdamW:
        return outsize.AdamW(lr=1e-2, weight_decay=0.1, max_grad_norm=cells.MAX_GRAD_NORM)

    def base(self) -> nn.Module:
        model = unquantized()
        model.generation_config.pad_token_id = 0
        quantize(model.model, self.quantization)
        return model

    def model(self) -> nn.Module:
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        model = get_peft_model(
            self.base(), LoraConfig(r=4, target_modules=targets, lora_dropout=0.1), autocast_adapter_dtype=False
        )
        torch.manual_seed(1)
        for name, param in model.named_parameters():
            if "lora_" in name:
                param.data = torch.randn(param.shape).mul(0.1).to(torch.bfloat16)
        return outsize.fuse_lora(model.train()) if self.is_fused else model.train()

    def batches(self) -> list[dict[str, Tensor]]:
        return [batch(seed) for seed in range(3)]


def batch(seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(1, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(seed))
    return dict(input_ids=ids, labels=ids)


def machine(num_bytes: int = cells.GiB) -> SimDevice:
    return SimDevice(lookup(f"{num_bytes}B"))


@functools.cache
def traced(case: Quantized) -> Traced:
    model = case.model()
    return cache.traced(model, batch(), find_layers(model), machine())


@functools.cache
def plain(case: Quantized, steps: int) -> tuple[Outcome, list[Any]]:
    """Plain training, with what evaluation between steps gives."""
    model = case.model()
    evaluations: list[Any] = []

    def after(what: str) -> None:
        if what == "step":
            evaluations.append(evaluate(model))

    outcome = cells.plain(model, case.batches(), spec=case.spec, steps=steps, after=after)
    assert max(outcome.norms) > cells.MAX_GRAD_NORM, "clipping must clip, or it is not tested"
    return outcome, evaluations


@torch.no_grad()
def evaluate(model: nn.Module) -> tuple[float, list[list[int]]]:
    """The loss of another batch in eval mode, and generated tokens."""
    model.eval()
    rng = torch.get_rng_state()
    given = batch(7)
    loss = float(model(**given).loss)
    made = model.generate(input_ids=given["input_ids"][:, :4], max_new_tokens=3, do_sample=False)  # type: ignore[operator]
    torch.set_rng_state(rng)
    model.train()
    return loss, made.tolist()


def of_plain_tensors(outcome: Outcome) -> Outcome:
    """Without weights that consist of other tensors: torch.equal does not compare them."""
    weights = {name: value for name, value in outcome.weights.items() if type(value) is Tensor}
    return dataclasses.replace(outcome, weights=weights)


def weights_of(model: nn.Module) -> list[nn.Parameter]:
    """The quantized weights."""
    params = [param for param in model.parameters() if not param.requires_grad]
    return [param for param in params if hasattr(param, "quant_state") or hasattr(param, "__tensor_flatten__")]
