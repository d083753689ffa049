"""Which attention kernels a model runs. That others are timed is tested on a GPU."""

from typing import Any

import packed
import pytest
import torch
import zoo

import outsize
from outsize.device.choose import choose_device
from outsize.device.sdp_kernel import only_kernel
from outsize.model.graph import BlockGraph
from outsize.profile.attention_kernels import AttentionCall, kernels_text, timed_on
from outsize.schedule.plan import Plan
from outsize.schedule.render import head

CPU = choose_device("cpu")


def call(**changes: Any) -> AttentionCall:
    query, mask = torch.ones(1, 4, 8, 16), torch.ones(8, 8)
    func = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    return AttentionCall.of(
        func, (query, query[:, :2], query[:, :2], 0.0, True), {"attn_mask": mask, "scale": 0.5} | changes
    )


def test_a_call_has_what_decides_its_time() -> None:
    found = call()
    assert (found.kernel, found.query, found.key, found.value) == ("flash", (1, 4, 8, 16), *2 * [(1, 2, 8, 16)])
    assert found.is_causal and found.has_mask and found.scale == 0.5 and found.dtype == torch.float32
    assert not call(attn_mask=None).has_mask


def test_kernels_are_timed_where_they_can_compute_it() -> None:
    given = call(attn_mask=None)
    assert all((timed_on(CPU, given, name) or 0.0) > 0 for name in ("flash", "math"))
    assert timed_on(CPU, given, "cudnn") is None


def kind_of(kernel: str, heads: int = 1, *, has_mask: bool = False) -> AttentionCall:
    return AttentionCall(kernel, *3 * [(1, heads, 4, 8)], torch.bfloat16, True, has_mask, None)


def test_the_text_names_the_most_frequent_kernel_first() -> None:
    assert kernels_text({}) == ""
    assert kernels_text({kind_of("efficient"): 1, kind_of("flash"): 2}) == "flash and efficient"


def test_the_text_compares_kernels_by_all_calls() -> None:
    calls = {kind_of("flash", heads): heads for heads in (1, 2)} | {kind_of("flash", has_mask=True): 9}
    seconds = {"flash": 1.0, "cudnn": 0.5, "efficient": 2.0}
    assert kernels_text(calls, lambda call, kernel: seconds[kernel]) == (
        "flash; cudnn takes 0.50 x as long, efficient takes 2.00 x as long (sdp_kernel: cudnn would be faster)"
    )
    uneven = {("flash", 1): 2.0, ("cudnn", 1): 1.0, ("flash", 2): 1.0, ("cudnn", 2): 2.0}
    text = kernels_text(calls, lambda call, kernel: uneven.get((kernel, call.query[1])))
    assert text == "flash; cudnn takes 1.25 x as long", "efficient cannot compute them"
    assert kernels_text(calls, lambda call, kernel: None) == "flash"
    assert kernels_text({kind_of("varlen_attn"): 4}, lambda call, kernel: 1.0) == "varlen_attn"


@pytest.mark.parametrize(
    ("kind", "device", "words"),
    [
        ("llama", "cpu", "flash"),
        ("t5", "cpu", ""),
        ("llama", "sim:1GiB", ""),
        ("packed", "cpu", "outsize's packed attention"),
    ],
)
def test_the_plan_names_the_kernel_in_use(kind: str, device: str, words: str) -> None:
    """Not on `sim`: it stands for a GPU, which would have others."""
    plan, graph = planned(kind, device)
    assert plan.attention == words
    assert [line for line in head(plan, graph) if line.startswith("attention ")] == (
        [f"attention {words}"] if words else []
    )


def planned(kind: str, device: str = "cpu") -> tuple[Plan, BlockGraph]:
    model = packed.model("llama") if kind == "packed" else zoo.make(kind)
    batch = packed.batch(packed.documents(10, 6)) if kind == "packed" else zoo.batch(kind)
    engine = outsize.prepare(model, batch, device=device)
    plan, graph = engine.plan, engine.runtime.place.graph
    engine.detach()
    return plan, graph


def test_a_profile_is_of_the_kernels_that_were_allowed() -> None:
    with only_kernel("math"):
        assert planned("llama")[0].attention == ""
    assert planned("llama")[0].attention == "flash"
