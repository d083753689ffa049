"""The kernel of SDPA: one for the whole process, refused in words where it does not exist."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from outsize.base.errors import ConfigError, ModelUnsupported
from outsize.device.choose import choose_device
from outsize.device.sdp_kernel import (
    KERNELS,
    allowed_kernels,
    explaining_missing_kernel,
    kernels_on_shapes,
    only_kernel,
    use_sdp_kernel,
)

CPU = choose_device("cpu")


@pytest.fixture(autouse=True)
def torchs_choice() -> Iterator[None]:
    before = allowed_kernels()
    yield
    use_sdp_kernel("auto", CPU)
    assert allowed_kernels() == before


def node_of(dropout: float = 0.0) -> str:
    query = torch.ones(1, 2, 8, 8, requires_grad=True)
    return type(F.scaled_dot_product_attention(query, query, query, dropout_p=dropout).grad_fn).__name__


def test_a_kernel_is_used_alone_until_auto_gives_the_choice_back_to_torch() -> None:
    assert "Flash" in node_of()
    use_sdp_kernel("math", CPU)
    assert allowed_kernels() == ("math",) and "Flash" not in node_of()
    use_sdp_kernel("flash", CPU)
    assert allowed_kernels() == ("flash",) and "Flash" in node_of()
    use_sdp_kernel("auto", CPU)
    assert set(allowed_kernels()) == set(KERNELS)
    torch.backends.cuda.enable_cudnn_sdp(False)
    use_sdp_kernel("auto", CPU)
    assert "cudnn" not in allowed_kernels(), "a switch of the user stays"
    torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.mark.parametrize("name", ["cudnn", "efficient"])
@pytest.mark.parametrize("device", ["cpu", "sim:1GiB"])
def test_kernels_of_cuda_are_refused_on_the_cpu(name: str, device: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is a kernel of CUDA GPUs, and this run computes on the CPU. Use"):
        use_sdp_kernel(name, choose_device(device))
    assert set(allowed_kernels()) == set(KERNELS)


@pytest.mark.parametrize("name", KERNELS)
def test_shapes_on_the_cpu_stand_for_every_kernel(name: str) -> None:
    """A fused kernel of a GPU is the fused one of the CPU; `math` stays."""
    with only_kernel(name), kernels_on_shapes():
        assert ("Flash" in node_of()) == (name != "math")


@pytest.mark.filterwarnings("ignore:.*kernel")
def test_a_kernel_that_cannot_compute_it_is_named() -> None:
    with (
        pytest.raises(ModelUnsupported, match="may use flash alone"),
        only_kernel("flash"),
        explaining_missing_kernel(),
    ):
        node_of(dropout=0.1)
    with pytest.raises(RuntimeError, match="another"), explaining_missing_kernel():
        raise RuntimeError("another")
    assert set(allowed_kernels()) == set(KERNELS)
