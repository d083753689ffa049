"""`benchmarks.osft` without a GPU: everything starts, and the targets are judged by the right figures."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import osft
from benchmarks.osft_targets import TARGETS, markdown

PEERS = """
import json, sys
if sys.argv[1] == "all":
    size = sys.argv[sys.argv.index("--bs") + 1]
    found = {"case": "peft_osf", "tok_s": 500, "step_s": 0.5, "gpu_peak_gib": 10.0}
    print("STEP 0:1.0s\\nRESULT " + json.dumps(found) + "\\nFAILED mini_trainer 3s rc=1 RuntimeError: no")
"""


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    words = [
        "osft.py",
        "--out",
        str(tmp_path / "out"),
        "--tiny",
        "--peers-file",
        str(tmp_path / "peers.py"),
        *arguments,
    ]
    monkeypatch.setattr(sys, "argv", words)
    osft.main()
    return json.loads((tmp_path / "out" / "osft.json").read_text())


def test_cases_are_measured_and_the_second_one_reads_its_bases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTSIZE_CACHE", str(tmp_path / "cache"))
    names = ["1b-4k-osft", "1b-4k-osft-cached", "1b-4k"]
    osft.measure(names, tmp_path / "part.json", tiny=True)
    found = json.loads((tmp_path / "part.json").read_text())
    assert list(found) == names and not any("problem" in row for row in found.values())
    first, cached, full = found.values()
    assert first["step_s"] == pytest.approx(first["planned_step_s"]) and first["osft"] == 0.5
    assert first["gpu_peak_gib"] == first["planned_gpu_peak_gib"] != full["gpu_peak_gib"]
    assert first["host_gib"] > 0 and cached["host_gib"] is None, "a process has one peak"
    assert first["decompose_s"] < first["bases_s"] and "decompose_s" not in cached and cached["bases_s"] > 0
    assert "bases_s" not in full and full["osft"] is None
    assert len(list((tmp_path / "cache" / "osft").iterdir())) == 42


def test_peers_and_what_is_left_out_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(tmp_path, monkeypatch, "--parts", "peers-1b")
    assert "peers.py is not there. Run ../shared/bench/make_site.sh" in found["parts"]["peers-1b"]["problem"]
    (tmp_path / "peers.py").write_text(PEERS)
    found = run(tmp_path, monkeypatch, "--parts", "peers-1b,peers-1b-fp32")
    assert set(found["peers"]) == {"1b-4k bf16 peft_osf", "1b-32k bf16 peft_osf", "1b-4k mixed peft_osf"}
    assert "FAILED mini_trainer" in found["parts"]["peers-1b"]["problem"]
    found = run(tmp_path, monkeypatch, "--parts", "3b,8b", "--limit", "5")
    problem = found["parts"]["3b"]["problem"]
    assert problem.startswith("not started: it takes about") and problem.endswith("Measure it with --parts 3b")
    assert not found["cases"] and problem in (tmp_path / "out" / "osft.md").read_text()


@pytest.mark.full
def test_a_part_is_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(tmp_path, monkeypatch, "--parts", "8b,1b-12")
    assert set(found["cases"]) == {"8b-24-osft", "1b-12-osft"} and not any(
        "problem" in p for p in found["parts"].values()
    )
    text = (tmp_path / "out" / "osft.md").read_text()
    assert "no figure says anything about a machine" in text and "MISSED" not in text and "| met |" not in text


def found_of(**factors: float) -> dict[str, Any]:
    """All figures are 1, times the factor that is given for a case."""
    keys = ["step_s", "tokens_per_s", "gpu_peak_gib", "host_gib", "bases_s", "gpu_reserved_gib"]
    cases = {}
    for name in osft.CASES:
        factor = factors.get(name.replace("-", "_"), 1.0)
        cases[name] = {key: factor for key in keys} | {f"planned_{key}": 1.0 for key in keys}
    peers = {
        f"{name} {dtype} {case}": {"tok_s": 1.0 if case == "peft_osf" else 0.5, "gpu_peak_gib": 1.0, "step_s": 1.0}
        for part in osft.PARTS.values()
        for name, _, _, dtype in part.peers
        for case in ("peft_osf", "mini_trainer")
    }
    return {"about": "", "is_tiny": False, "cases": cases, "peers": peers, "parts": {}}


def judged(found: dict[str, Any]) -> dict[str, str]:
    rows = [line.split(" | ") for line in markdown(found).splitlines() if line.startswith(("| 1B", "| 3B", "| 8B"))]
    return {row[0].removeprefix("| "): row[-1].removesuffix(" |") for row in rows}


def test_every_target_is_judged_by_cases_that_are_measured() -> None:
    assert len(judged(found_of())) == len(TARGETS)
    missed = {text for text, verdict in judged(found_of()).items() if verdict != "met"}
    assert missed == {target.text for target in TARGETS if "fastest peer" in target.text}
    nothing = found_of() | {"cases": {}, "peers": {}}
    assert set(judged(nothing).values()) == {"not measured"}


def test_targets_are_met_and_missed() -> None:
    text = "1B, 4k tokens, u = 0.5: step ÷ full fine-tuning"
    assert judged(found_of(**{"1b_4k_osft": 1.29}))[text] == "met"
    assert judged(found_of(**{"1b_4k_osft": 1.31}))[text] == "MISSED"
    assert judged(found_of(**{"1b_4k_osft": 1.31}))["1B, 4k tokens: tokens/s ÷ fastest peer"] == "met"
    plan = "8B under 24 GiB: GPU peak, % from the plan"
    assert [judged(found_of(**{"8b_24_osft": value}))[plan] for value in (0.98, 1.005)] == ["MISSED", "met"]
    assert judged(found_of(**{"8b_24": 1.3}))["8B under 24 GiB: tokens/s ÷ full with clipping"] == "MISSED"


def test_every_case_is_in_one_part_and_fits_the_time() -> None:
    measured = [name for part in osft.PARTS.values() for name in part.cases]
    assert sorted(measured) == sorted(osft.CASES)
    assert sum(part.seconds for name, part in osft.PARTS.items() if name != "peers-3b") <= 540
