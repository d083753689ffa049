"""Tensors inside what modules take and return: found in order, replaced in place, everything around them left
as it is.
"""

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast

from outsize.model.tensors import map_tensors, tensors_in, with_grad

Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Record:
    hidden: Tensor
    count: int = 3
    rest: Any = None


class Pair:
    """As PEFT's ShadowCarrier."""

    def __init__(self, hidden: Tensor, shadow: Tensor):
        self.hidden, self.shadow, self.scale = hidden, shadow, 0.5

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pair) and vars(self) == vars(other)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Frozen:
    hidden: Tensor


A, B, C = torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])
MAX = torch.max(torch.eye(2), 0)
NESTED: dict[str, tuple[Any, list[Tensor]]] = {
    "a tensor": (A, [A]),
    "a tuple": ((A, 1, B), [A, B]),
    "a list": ([A, "text", [B, (C,)]], [A, B, C]),
    "a namedtuple": (Point(A, (B, 7)), [A, B]),
    "a dict": ({"b": A, "a": {"c": B}, "n": None}, [A, B]),
    "an OrderedDict": (OrderedDict(z=A, a=B), [A, B]),
    "a dataclass": (Record(A, 5, {"x": B}), [A, B]),
    "a plain record": ((Pair(A, B), C), [A, B, C]),
    "a frozen dataclass": (Frozen(hidden=A), [A]),
    "a ModelOutput": (BaseModelOutput(last_hidden_state=A, hidden_states=(B, C)), [A, B, C]),
    "a ModelOutput with a gap": (CausalLMOutputWithPast(loss=None, logits=A, attentions=(B,)), [A, B]),
    "a BatchEncoding": (BatchEncoding({"input_ids": A, "labels": B}), [A, B]),
    "what torch.max returns": (MAX, [MAX.values, MAX.indices]),
    "no tensor": ((1, "a", None, {"b": 2.5}, torch.float32, torch.Size((2, 3))), []),
}


@pytest.mark.parametrize("name", NESTED)
def test_tensors_are_found_in_order(name: str) -> None:
    value, expected = NESTED[name]
    found = list(tensors_in(value))
    assert len(found) == len(expected) and all(a is b for a, b in zip(found, expected, strict=True))


def describe(value: Any) -> Any:
    """The nesting with types, and numbers for tensors."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (tuple, list)):
        return type(value), [describe(item) for item in value]
    if hasattr(value, "items"):
        return type(value), [(key, describe(item)) for key, item in value.items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value), [(f.name, describe(getattr(value, f.name))) for f in dataclasses.fields(value)]
    return value


@pytest.mark.parametrize("name", NESTED)
def test_replacing_and_replacing_back_gives_the_same_nesting_and_leaves_the_first_alone(name: str) -> None:
    value, _ = NESTED[name]
    before = describe(value)
    changed = map_tensors(lambda t: t + 10, value)
    assert describe(value) == before
    assert describe(map_tensors(lambda t: t - 10, changed)) == before
    assert [t.tolist() for t in tensors_in(changed)] == [(t + 10).tolist() for t in tensors_in(value)]


def test_a_model_output_keeps_its_attributes_and_its_keys() -> None:
    changed = map_tensors(lambda t: t * 2, BaseModelOutput(last_hidden_state=A, hidden_states=(B,)))
    assert isinstance(changed, BaseModelOutput) and list(changed.keys()) == ["last_hidden_state", "hidden_states"]
    assert changed.last_hidden_state.tolist() == changed[0].tolist() == [2.0] and changed.attentions is None


def test_a_replacement_need_not_be_a_tensor() -> None:
    """The offload strategy puts a marker in the input's place."""
    marker = object()
    assert map_tensors(lambda t: marker, (A, [B]))[1][0] is marker  # type: ignore[arg-type,return-value]


def test_a_class_is_not_a_record() -> None:
    assert list(tensors_in(Record)) == [] and map_tensors(lambda t: t, Record) is Record


@pytest.mark.parametrize("name", ["defaultdict", "init=False"])
def test_mappings_and_records_with_another_constructor_are_copied(name: str) -> None:
    @dataclasses.dataclass
    class Counted:
        hidden: Tensor
        count: int = dataclasses.field(init=False, default=3)

    value: Any = defaultdict(list, hidden=A) if name == "defaultdict" else Counted(A)
    changed = map_tensors(lambda t: t + 1, value)
    assert [t.tolist() for t in tensors_in(changed)] == [[2.0]] and type(changed) is type(value)


def test_with_grad_gives_each_tensor_once_and_only_those_that_require_grad() -> None:
    leaf = torch.ones(2, requires_grad=True)
    result = leaf * 2
    assert with_grad((leaf, [result, {"again": result}], torch.ones(2), Record(result))) == [leaf, result]
    assert with_grad(None) == []
