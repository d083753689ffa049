"""benchmarks/side_by_side.py without a GPU: processes are played, the table and the verdicts are real."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import side_by_side as side
from benchmarks.shapes import SHAPES


def play(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *args: str, tokens: float = 10000.0, host: float = 13.0
) -> tuple[dict, list[str]]:
    """Run the cases; returns what was written and the processes that were started."""
    started: list[str] = []
    peers = tmp_path / "carry" / "bench" / "peers.py"
    peers.parent.mkdir(parents=True)
    peers.touch()

    def run(self: Any, what: str, command: list[str], env: dict[str, str]) -> tuple[int, list[str], float]:
        started.append(what)
        if "--json" not in command:
            return (
                (0, ["noise", f"RESULT {json.dumps({'tok_s': 4000})}"], 1.0)
                if "ds2" not in command
                else (1, ["RuntimeError: no"], 1.0)
            )
        if "llama-7b" in command:
            return 2, ["PlanInfeasible: it does not fit"], 1.0
        found = {
            "speed": {"tokens_per_second": tokens, "median_step_seconds": 0.8},
            "plan": {"step_seconds": 0.7},
            "limit_ratio": 1.1,
            "memory": {"gpu_peak_bytes": 2**34, "host_peak_bytes": 2**35, "host_bytes_per_param": host},
            "baselines": {"plain": {"speed": {"tokens_per_second": 9000.0}}} if "--compare" in command else {},
        }
        Path(command[command.index("--json") + 1]).write_text(json.dumps(found))
        return 0, ["fine"], 1.0

    monkeypatch.setattr(side.Run, "run", run)
    monkeypatch.setattr(
        sys, "argv", ["side_by_side.py", "--out", str(tmp_path / "found.json"), "--peers-file", str(peers), *args]
    )
    side.main()
    return json.loads((tmp_path / "found.json").read_text())["cases"], started


def test_the_best_offloading_peer_runs_once_for_the_cases_that_share_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cases, started = play(
        monkeypatch, tmp_path, "--cases", "3b-24,3b-24-clip", "--peers", "--offloaders", "fsdp2,ds2", tokens=9000.0
    )
    assert [what.split()[0] for what in started] == ["3b-24:", "fsdp2", "ds2", "3b-24-clip:"]
    assert started[1] == "fsdp2 --model llama3b --budget 24 --bs 8 --seq 1024 --steps 6"
    assert [
        (case["verdict"]["against"], case["verdict"]["ratio"], case["verdict"]["met"]) for case in cases.values()
    ] == [("fsdp2", 2.25, False), ("fsdp2", 2.25, True)]


def test_resident_peers_have_the_whole_card_and_memory_has_its_own_target(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases, started = play(
        monkeypatch, tmp_path, "--cases", "3b-48,1b-resident,8b-24,8b-24-clip,7b-24", "--peers", "--limit", "5000"
    )
    assert "gc --model llama3b --budget 0 --bs 8 --seq 1024 --steps 6" in started
    assert {name: case["verdict"]["met"] for name, case in cases.items()} == {
        "3b-48": True,
        "1b-resident": True,
        "8b-24": False,
        "8b-24-clip": True,
        "7b-24": None,
    }
    shown = capsys.readouterr().out
    assert (
        "PlanInfeasible: it does not fit" in shown
        and "MISSED" in shown
        and "≤ 12.5 B" in shown
        and "plain loop" in shown
    )


def test_nothing_is_started_that_would_not_end_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cases, started = play(monkeypatch, tmp_path, "--cases", "3b-24,8b-24", "--peers", "--limit", "70")
    assert started == ["3b-24: ours"], "the peer takes longer than what is left, and so does 8b"
    assert "not started" in cases["8b-24"]["ours"]["problem"] and cases["3b-24"]["verdict"]["met"] is None


OSFT = [case for case in side.CASES.values() if case.osft]


def test_cases_name_shapes_and_one_target_each() -> None:
    for case in side.CASES.values():
        assert case.model in SHAPES
        is_pair = any(replace(other, osft=None, seconds=0) == replace(case, seconds=0) for other in OSFT)
        # OSFT is compared with the row beside it, and that row with OSFT.
        assert case.osft or is_pair or (case.least_ratio is None) != (case.most_host is None)
