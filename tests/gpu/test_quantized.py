"""Quantized bases on the GPU: the bytes of its quantizer, dequantization, and training with weights in slots."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from quantized_folders import BF16, bf16_folder

import outsize
from outsize.config.read import parse_config
from outsize.model.build import build_model
from outsize.quant.four_bit import quantize_4bit
from outsize.quant.settings import Quantization
from outsize.quant.weight_only import Fp8Linear, dequantize_rows
from outsize.run.adapters import adapt

pytestmark = pytest.mark.gpu
bnb = pytest.importorskip("bitsandbytes")


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_bitsandbytes_on_the_gpu_makes_the_same_bytes(dtype: torch.dtype, quant_type: str) -> None:
    """Of weights and of scales that are not quantized. Codes of scales differ: on the CPU it rounds them with a table."""
    weight = (torch.randn(2**22, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    on_gpu, state = bnb.functional.quantize_4bit(weight.cuda(), quant_type=quant_type)
    packed = torch.empty(on_gpu.shape, dtype=torch.uint8)
    scales = quantize_4bit(weight, packed, quant_type, double=False)
    assert torch.equal(scales.absmax, state.absmax.cpu())
    assert torch.equal(packed, on_gpu.cpu())


def test_dequantized_weights_have_the_bits_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    codes, rows = torch.randint(-127, 128, (512, 300), generator=generator, dtype=torch.int8), torch.rand(512)
    assert torch.equal(dequantize_rows(codes, rows, BF16), dequantize_rows(codes.cuda(), rows.cuda(), BF16).cpu())
    layer = Fp8Linear(300, 512, bias=None, block=(128, 128), scale_dtype=torch.float32, compute_dtype=BF16)
    codes8, scale = torch.randn(512, 300, generator=generator).to(torch.float8_e4m3fn), torch.rand(4, 3)
    on_gpu = layer._dequantize(codes8.cuda(), scale.cuda(), BF16)
    assert torch.equal(layer._dequantize(codes8, scale, BF16), on_gpu.cpu())


@pytest.mark.parametrize("settings", [dict(load_in_4bit=True), dict(load_in_8bit=True)], ids=["nf4", "int8"])
def test_streamed_and_resident_bases_give_the_same_losses(tmp_path: Path, settings: dict[str, Any]) -> None:
    pytest.importorskip("peft")
    keys = {"adapter": "lora", "lora_target_linear": True, "lora_r": 4}
    run = parse_config({"base_model": str(tmp_path), "datasets": ["data"], **keys}, "here")
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=4, vocab_size=512
    )
    folder = bf16_folder(tmp_path, config=config)
    ids = torch.randint(0, 512, (2, 64), generator=torch.Generator().manual_seed(0)).cuda()
    found = []
    for pins in (None, outsize.Pins(n_persist=0)):
        built = build_model(str(folder), dtype=BF16, quantization=Quantization(**settings))
        torch.manual_seed(3)
        built = adapt(built, run)
        model: Any = built.model
        batch = {"input_ids": ids, "labels": ids}
        engine = outsize.prepare(model, batch, weights=built.weights, optimizer=outsize.AdamW(lr=1e-3), pins=pins)
        assert any(home.weights == "host" for home in engine.plan.decision.homes) == (pins is not None)
        losses = []
        for _ in range(3):
            loss = model(**batch).loss
            loss.backward()
            engine.step()
            losses.append(loss.item())
        found.append(losses)
        engine.close()
    assert found[0] == found[1]
