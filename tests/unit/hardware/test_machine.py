"""A machine's YAML file: what is written reads back equal, and an error lists every mistake."""

import dataclasses
import math
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from outsize.base.errors import ConfigError
from outsize.hardware.catalog import CATALOG, MACHINES, lookup
from outsize.hardware.machine import Machine, read_machine, write_machine
from outsize.hardware.spec import CONTEXT_BYTES, HardwareSpec

RATES, SECONDS = st.floats(min_value=1e6, max_value=1e19), st.floats(min_value=1e-9, max_value=0.09)
SIZES = st.integers(min_value=2**20, max_value=2**50 - 1)
WORDS = st.text(
    st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=8
)  # PyYAML writes U+0085 as a line's end
FIGURES = st.dictionaries(WORDS, st.one_of(RATES, st.integers(), WORDS, st.lists(RATES, max_size=2)), max_size=3)


def a_spec(**change: object) -> HardwareSpec:
    return dataclasses.replace(CATALOG["rtx4090"], **change)  # type: ignore[arg-type]


@given(
    gpu=SIZES,
    context=st.one_of(st.just(0), SIZES),
    flops=RATES,
    launch=SECONDS,
    share=st.floats(0, 0.99),
    figures=FIGURES,
)
def test_what_is_written_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory,
    gpu: int,
    context: int,
    flops: float,
    launch: float,
    share: float,
    figures: dict,
) -> None:
    assume(context < gpu)
    spec = a_spec(
        gpu_bytes=gpu,
        context_bytes=context,
        flops=flops,
        launch_seconds=launch,
        allocator_share=share,
        provenance="#1: 'odd' \"words\" é",
    )
    path = tmp_path_factory.mktemp("machine") / "m.yaml"
    path.write_text(write_machine(Machine(spec=spec, measured=figures)), encoding="utf-8")
    assert read_machine(path) == Machine(spec=spec, measured=figures)


@pytest.mark.parametrize("name", CATALOG)
def test_every_file_of_the_catalog_is_named_as_its_machine_and_reads_back(name: str, tmp_path: Path) -> None:
    machine = read_machine(MACHINES / f"{name}.yaml")
    assert machine.spec.name == name and machine.spec.context_bytes == CONTEXT_BYTES
    (tmp_path / "again.yaml").write_text(write_machine(machine))
    assert read_machine(tmp_path / "again.yaml") == machine


def test_numbers_are_written_as_people_read_them() -> None:
    text = write_machine(
        Machine(spec=a_spec(h2d_bytes_per_second=54.3e9, launch_seconds=12e-6, gpu_bytes=24 * 2**30), measured={})
    )
    assert (
        "h2d_bytes_per_second: 54.3e+9\n" in text
        and "launch_seconds: 12.0e-6\n" in text
        and "gpu_bytes: 24GiB\n" in text
        and "measured" not in text
    )


GOOD = write_machine(Machine(spec=a_spec(), measured={}))
MISTAKES = {
    "a missing key": (
        GOOD.replace("flops: ", "# "),
        ["1 problem", "flops: missing. Give a number such as 25.0e+9", "FLOPs a second"],
    ),
    "a key without a value": (GOOD.replace("name: rtx4090", "name:"), ["name: missing. Give a non-empty string"]),
    "a string for a number": (
        GOOD.replace("launch_seconds: 10.0e-6", "launch_seconds: fast"),
        ["launch_seconds: 'fast' is not a number from"],
    ),
    "a negative rate": (GOOD.replace("flops: ", "flops: -"), ["flops: -1155", "is not a number such as 25.0e+9"]),
    "no rate at all": (
        GOOD.replace("launch_seconds: 10.0e-6", "launch_seconds: 0"),
        ["launch_seconds: 0 is not a number from 1e-09"],
    ),
    "NaN": (GOOD.replace("launch_seconds: 10.0e-6", "launch_seconds: .nan"), ["launch_seconds: nan is not a number"]),
    "infinity": (
        GOOD.replace("launch_seconds: 10.0e-6", "launch_seconds: .inf"),
        ["launch_seconds: inf is not a number"],
    ),
    "a number beyond floats": (
        GOOD.replace("launch_seconds: 10.0e-6", "launch_seconds: 1" + "0" * 400),
        ["launch_seconds: 1000", "is not a number"],
    ),
    "true for a number": (
        GOOD.replace("launch_seconds: 10.0e-6", "launch_seconds: yes"),
        ["launch_seconds: true is not a number"],
    ),
    "microseconds": (
        GOOD.replace("launch_seconds: 10.0e-6", "launch_seconds: 10"),
        ["launch_seconds: 10 is not a number"],
    ),
    "faster while busy": (
        GOOD + "launch_slowdown: 0.1\n",
        ["launch_slowdown: 0.1 is not a number from 1 to below 100"],
    ),
    "a sustained_clock_ratio that is none": (
        GOOD + "sustained_clock_ratio: 0.01\n",
        ["sustained_clock_ratio: 0.01 is not a number from 0.5"],
    ),
    "more than any machine": (
        GOOD.replace("gpu_bytes: 24GiB", "gpu_bytes: 9999999TiB"),
        ["gpu_bytes: '9999999TiB' is not a size"],
    ),
    "a context without a card": (
        GOOD.replace("context_bytes: 600MiB", "context_bytes: 30GiB"),
        ["context_bytes: 30GiB is not less than gpu_bytes (24GiB)"],
    ),
    "GB a second": (
        GOOD.replace("h2d_bytes_per_second: 25.0e+9", "h2d_bytes_per_second: 25"),
        ["h2d_bytes_per_second: 25 is not a number"],
    ),
    "GB": (GOOD.replace("gpu_bytes: 24GiB", "gpu_bytes: 24GB"), ["gpu_bytes: ", "use GiB"]),
    "a size without its unit": (
        GOOD.replace("gpu_bytes: 24GiB", "gpu_bytes: 24"),
        ["gpu_bytes: 24 is not a size such as 24GiB"],
    ),
    "a negative size": (
        GOOD.replace("context_bytes: 600MiB", "context_bytes: -600"),
        ["context_bytes: -600 is not a size"],
    ),
    "false for a size": (
        GOOD.replace("context_bytes: 600MiB", "context_bytes: false"),
        ["context_bytes: false is not a size"],
    ),
    "a list for a size": (
        GOOD.replace("gpu_bytes: 24GiB", "gpu_bytes: [24GiB]"),
        ["gpu_bytes: ['24GiB'] is not a size"],
    ),
    "all of the memory lost": (
        GOOD.replace("allocator_share: 0.02", "allocator_share: 1"),
        ["allocator_share: 1 is not a number from 0 to below 1"],
    ),
    "an unknown key": (
        GOOD + "h2d_bytes_per_sec: 1\n",
        ["h2d_bytes_per_sec: unknown key; did you mean h2d_bytes_per_second?"],
    ),
    "a key that is no word": (GOOD + "7: 1\n", ["7: unknown key"]),
    "a key twice": (GOOD + "name: other\n", ["name: given twice"]),
    "figures that are none": (GOOD + "measured: much\n", ["measured: 'much' is not a mapping"]),
    "not YAML": ("name: [\n", ["not valid YAML in line"]),
    "a list": ("- 1\n- 2\n", ["holds a list, not a mapping of keys to values", "outsize probe --save"]),
    "a text": ("rtx4090", ["holds a str"]),
    "nothing": ("", ["is empty"]),
    "only comments": ("# nothing\n", ["is empty"]),
    "zero bytes": ("\x00\x01", ["not valid YAML", "a character that YAML does not allow"]),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_every_mistake_in_a_file_is_an_error(kind: str, tmp_path: Path) -> None:
    text, words = MISTAKES[kind]
    path = tmp_path / "m.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        lookup(str(path))
    assert str(path) in str(caught.value)
    for part in words:
        assert part in str(caught.value), caught.value


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text("name: mine\ngpu_bytes: much\nflop: 1e12\nh2d_bytes_per_second: -1\n")
    with pytest.raises(ConfigError) as caught:
        lookup(str(path))
    text = str(caught.value)
    given = ("name", "gpu_bytes", "h2d_bytes_per_second", "flops")  # a misspelt key is one problem, and not missing too
    missing = [
        field.name
        for field in dataclasses.fields(HardwareSpec)
        if field.default is dataclasses.MISSING and field.name not in given
    ]
    assert f"{len(missing) + 3} problems" in text
    assert all(f"{name}: missing" in text for name in missing)
    assert (
        "gpu_bytes: " in text
        and "flop: unknown key; did you mean flops?" in text
        and "h2d_bytes_per_second: -1 is not" in text
    )


def test_a_folder_and_a_missing_file_are_errors_with_their_path(tmp_path: Path) -> None:
    for path, words in ((tmp_path, "directory"), (tmp_path / "none.yaml", "No such file")):
        with pytest.raises(ConfigError, match=words) as caught:
            lookup(str(path))
        assert str(path) in str(caught.value)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigError, match=r"binary\.yaml.*UTF-8"):
        lookup(str(tmp_path / "binary.yaml"))


def test_a_path_is_accepted_wherever_a_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outsize.device.choose import choose_device

    (tmp_path / "4090box.yaml").write_text(GOOD.replace("name: rtx4090", "name: box"))  # begins as a size does
    monkeypatch.chdir(tmp_path)
    assert lookup("4090box.yaml") == lookup(str(tmp_path / "4090box.yaml")) == a_spec(name="box")
    assert choose_device("sim:4090box.yaml").spec == a_spec(name="box")


def test_numbers_in_the_style_of_yaml_and_of_people_are_the_same(tmp_path: Path) -> None:
    for written in ("55e9", "55.0e+9", "55000000000", "55_000_000_000"):
        (tmp_path / "m.yaml").write_text(
            GOOD.replace("h2d_bytes_per_second: 25.0e+9", f"h2d_bytes_per_second: {written}")
        )
        assert math.isclose(read_machine(tmp_path / "m.yaml").spec.h2d_bytes_per_second, 55e9)
