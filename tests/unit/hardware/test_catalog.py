"""The catalog: every machine is complete, and a size is a small machine with that much memory."""

import dataclasses

import pytest

from outsize.base.errors import ConfigError
from outsize.base.records import dumps, loads
from outsize.hardware.catalog import CATALOG, lookup
from outsize.hardware.spec import HardwareSpec


@pytest.mark.parametrize("name", CATALOG)
def test_every_machine_of_the_catalog_has_positive_rates_and_says_where_they_come_from(name: str) -> None:
    spec = lookup(name)
    assert spec.name == name
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        assert value, field.name
        assert isinstance(value, str) or value > 0, field.name
    assert "estimated" in spec.provenance or "measured" in spec.provenance


@pytest.mark.parametrize("name", [*CATALOG, "64MiB"])
def test_every_machine_survives_json(name: str) -> None:
    assert loads(HardwareSpec, dumps(lookup(name))) == lookup(name)


@pytest.mark.parametrize("name", CATALOG)
def test_gpu_memory_is_faster_than_the_host_which_is_faster_than_the_bus(name: str) -> None:
    """What every plan relies on; a typing error in a row would turn plans upside down."""
    spec = lookup(name)
    assert spec.gpu_bytes_per_second > spec.host_bytes_per_second > spec.h2d_bytes_per_second
    assert spec.gpu_adam_params_per_second > spec.host_adam_params_per_second


def test_a_size_is_a_machine_with_that_much_memory() -> None:
    spec = lookup("64MiB")
    assert spec.gpu_bytes == 64 * 2**20 and spec.name == "64MiB"
    assert lookup("123457B").gpu_bytes == 123457
    assert dataclasses.replace(lookup("1GiB"), name="", gpu_bytes=0) == dataclasses.replace(spec, name="", gpu_bytes=0)


def test_an_unknown_machine_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError) as caught:
        lookup("rtx9999")
    for part in ("rtx9999", "rtx4090", "h200", "64MiB"):
        assert part in str(caught.value)


def test_case_and_spaces_do_not_matter_and_a_prefix_is_completed() -> None:
    assert (
        lookup("H100") == lookup("h100")
        and lookup("RTX 4090") == lookup("rtx4090")
        and lookup("A100_80GB") == lookup("a100-80gb")
    )
    with pytest.raises(ConfigError, match="Did you mean a100-40gb or a100-80gb"):
        lookup("a100")
    with pytest.raises(ConfigError, match="Did you mean rtx4090"):
        lookup("4090")
    with pytest.raises(ConfigError, match="hardware 24 is not a string"):
        lookup(24)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["64MB", "64", "0B"])
def test_an_invalid_size_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="device size"):
        lookup(name)
