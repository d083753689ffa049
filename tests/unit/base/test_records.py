"""Records: to JSON and back without loss; errors name the place in the file."""

import json
from dataclasses import dataclass, replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.base.errors import ConfigError
from outsize.base.records import dumps, fingerprint, from_json, loads, to_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    name: str
    size: int
    rate: float
    kind: Literal["gpu", "host"]
    on: bool


@dataclass(frozen=True, kw_only=True)
class Branch:
    leaves: tuple[Leaf, ...]
    pair: tuple[int, str]
    by_name: dict[str, Leaf]
    nested: tuple[tuple[int, ...], ...]
    best: Leaf | None
    limit: int | None


leaves = st.builds(
    Leaf,
    name=st.text(),
    size=st.integers(),
    rate=st.floats(allow_nan=False, allow_infinity=False),
    kind=st.sampled_from(["gpu", "host"]),
    on=st.booleans(),
)
branches = st.builds(
    Branch,
    leaves=st.lists(leaves, max_size=3).map(tuple),
    pair=st.tuples(st.integers(), st.text()),
    by_name=st.dictionaries(st.text(), leaves, max_size=3),
    nested=st.lists(st.lists(st.integers(), max_size=3).map(tuple), max_size=3).map(tuple),
    best=st.none() | leaves,
    limit=st.none() | st.integers(),
)

LEAF = Leaf(name="a", size=1, rate=0.5, kind="gpu", on=True)
BRANCH = Branch(leaves=(LEAF,), pair=(1, "x"), by_name={"a": LEAF}, nested=((1, 2), ()), best=None, limit=3)


@given(branches)
def test_every_record_comes_back_equal_with_the_same_fingerprint(record: Branch) -> None:
    again = loads(Branch, dumps(record))
    assert again == record
    assert fingerprint(again) == fingerprint(record)
    assert dumps(again) == dumps(record)


@given(branches, branches)
def test_different_records_have_different_fingerprints(one: Branch, other: Branch) -> None:
    # Compared by their JSON: 0.0 and -0.0 are equal but are not the same record.
    assert (fingerprint(one) == fingerprint(other)) == (
        json.dumps(to_json(one), sort_keys=True) == json.dumps(to_json(other), sort_keys=True)
    )


def test_the_fingerprint_does_not_depend_on_the_order_of_a_dictionary() -> None:
    other = replace(LEAF, name="b")
    assert fingerprint(replace(BRANCH, by_name={"a": LEAF, "b": other})) == fingerprint(
        replace(BRANCH, by_name={"b": other, "a": LEAF})
    )


def test_any_changed_field_changes_the_fingerprint() -> None:
    changes = ({"limit": 4}, {"limit": None}, {"best": LEAF}, {"pair": (1, "y")}, {"nested": ((1, 2),)}, {"leaves": ()})
    changed = [replace(BRANCH, **change) for change in changes]
    assert len({fingerprint(record) for record in (BRANCH, *changed)}) == len(changed) + 1


def test_a_missing_and_an_unknown_key_are_both_named_with_their_place() -> None:
    data = to_json(BRANCH)
    data["leaves"][0].pop("size")
    data["leaves"][0]["colour"] = "red"
    with pytest.raises(ConfigError) as caught:
        from_json(Branch, data, where="plan.json")
    for part in ("plan.json.leaves.0.size: missing", "plan.json.leaves.0.colour: unknown key"):
        assert part in str(caught.value)


def test_a_field_that_came_later_has_its_default() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Later(Leaf):
        age: int = 7

    assert from_json(Later, to_json(LEAF)) == Later(**to_json(LEAF))


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"pair": [1]}, "Branch.pair"),
        ({"pair": [1, 2]}, "Branch.pair.1"),
        ({"nested": [[1, "2"]]}, "Branch.nested.0.1"),
        ({"leaves": {}}, "Branch.leaves"),
        ({"leaves": [3]}, "Branch.leaves.0"),
        ({"by_name": []}, "Branch.by_name"),
        ({"by_name": {"k": None}}, "Branch.by_name.k"),
        ({"limit": True}, "Branch.limit"),
        ({"limit": 1.5}, "Branch.limit"),
        ({"best": {**to_json(LEAF), "kind": "disk"}}, "Branch.best.kind"),
        ({"best": {**to_json(LEAF), "rate": "fast"}}, "Branch.best.rate"),
        ({"best": {**to_json(LEAF), "on": 1}}, "Branch.best.on"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_its_place(change: dict, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_json(Branch, {**to_json(BRANCH), **change})
    assert str(caught.value).startswith(place + ": "), str(caught.value)


def test_a_whole_number_is_a_float_but_not_the_other_way_round() -> None:
    loaded = from_json(Leaf, {**to_json(LEAF), "rate": 2})
    assert loaded.rate == 2.0 and isinstance(loaded.rate, float)


@pytest.mark.parametrize("keep", [0, 1, 10, -2])
def test_a_truncated_file_is_refused_by_name(keep: int) -> None:
    with pytest.raises(ConfigError, match=r"plan\.json: not valid JSON.*truncated"):
        loads(Branch, dumps(BRANCH)[:keep], where="plan.json")


@pytest.mark.parametrize("text", ["[]", "3", "null", '"plan"'])
def test_json_that_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"Leaf: .* is not a mapping\."):
        loads(Leaf, text)


def test_what_has_no_json_form_is_an_error_of_ours() -> None:
    with pytest.raises(TypeError, match="set has no JSON form"):
        to_json({"a": {1, 2}})
