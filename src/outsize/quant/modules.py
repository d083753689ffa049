"""Linear layers of bitsandbytes with unmaterialized weights and scales. Imported only where bitsandbytes is needed."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from outsize.model.weights import unmaterialized
from outsize.quant.four_bit import BLOCK, NESTED_BLOCK
from outsize.quant.installed import bitsandbytes
from outsize.quant.weight_only import WeightOnly, dequantize_rows, weight_only_linear

bnb = bitsandbytes()


def quant_state(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    quant_type: str,
    *,
    nested: bool,
    blocksize: int = BLOCK,
    code: Tensor | None = None,
    nested_code: Tensor | None = None,
) -> Any:
    """The scales of a 4-bit weight. `dtype`: that the weight had. `nested`: with double quantization. `code`,
    `nested_code`: the values of codes, if they are not those of bitsandbytes. Each weight has tables of its own:
    transformers does not save shared tensors.
    """
    blocks = math.ceil(math.prod(shape) / blocksize)
    state = bnb.functional.QuantState(
        absmax=unmaterialized((blocks,), torch.uint8 if nested else torch.float32),
        shape=torch.Size(shape),
        code=bnb.functional.get_4bit_type(quant_type, device="cpu") if code is None else code,
        blocksize=blocksize,
        quant_type=quant_type,
        dtype=dtype,
    )
    if nested:
        state.nested, state.offset = True, unmaterialized((), torch.float32)
        state.state2 = bnb.functional.QuantState(
            absmax=unmaterialized((math.ceil(blocks / NESTED_BLOCK),), torch.float32),
            code=bnb.functional.create_dynamic_map() if nested_code is None else nested_code,
            blocksize=NESTED_BLOCK,
            dtype=torch.float32,
        )
    return state


def four_bit_linear(shape: tuple[int, int], bias: nn.Parameter | None, state: Any, compute_dtype: torch.dtype) -> Any:
    """`shape`: output and input features."""
    linear = bnb.nn.Linear4bit(
        shape[1],
        shape[0],
        bias=False,
        compute_dtype=compute_dtype,
        compress_statistics=state.nested,
        quant_type=state.quant_type,
        device="meta",
    )
    linear.bias, linear.quant_state = bias, state
    linear.weight = bnb.nn.Params4bit(
        unmaterialized(((math.prod(shape) + 1) // 2, 1), torch.uint8),
        requires_grad=False,
        quant_state=state,
        blocksize=state.blocksize,
        compress_statistics=state.nested,
        quant_type=state.quant_type,
        module=linear,
        bnb_quantized=True,
    )
    linear.support_avx512bf16_for_cpu = False  # its forward would replace the weight by another form of it
    return linear


class Int8Linear(bnb.nn.Linear8bitLt, WeightOnly):  # type: ignore[name-defined]
    """A linear layer with int8 weights and a scale per row (`SCB`), stored, adapted and merged as bitsandbytes' own."""

    def __init__(self, shape: tuple[int, int], bias: nn.Parameter | None, compute_dtype: torch.dtype):
        """`shape`: output and input features."""
        super().__init__(shape[1], shape[0], bias=False, has_fp16_weights=False, device="meta")
        self.bias = bias
        self.compute_dtype = compute_dtype
        """PEFT makes adapters in this dtype."""
        self.weight = bnb.nn.Int8Params(
            unmaterialized(shape, torch.int8), requires_grad=False, SCB=unmaterialized((shape[0],), torch.float32)
        )

    def forward(self, x: Tensor) -> Tensor:
        return weight_only_linear(x, self.weight, self.weight.SCB, self.bias, dequantize_rows)

    def dense_weight(self, dtype: torch.dtype) -> Tensor:
        return dequantize_rows(self.weight, self.weight.SCB, dtype)
