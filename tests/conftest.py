"""What all tests share: one thread, one seed, and no GPU tests where there is no GPU."""

import dataclasses
import gc
import itertools
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

# Until pytest_configure has a folder for this session. One in the user's cache may be older than the tracer.
os.environ["OUTSIZE_CACHE"] = ""

# Reductions split their work by the number of threads, so their bits depend on it.
torch.set_num_threads(1)

try:
    from hypothesis import settings
except ImportError:
    # A GPU box where nothing can be installed. `pytest -m gpu` imports every file it collects, so those that need
    # hypothesis are left out, and it says so.
    HAS_HYPOTHESIS = False
else:
    HAS_HYPOTHESIS = True
    # Derandomised: a run that fails here fails everywhere. No deadline: two test processes share two cores.
    settings.register_profile("outsize", deadline=None, derandomize=True, max_examples=60)
    settings.load_profile("outsize")


_CACHE = "outsize_cache"
"""Among what xdist tells its workers: the folder of profiles of this session."""
_FOLDER = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """All processes of a session share one profile cache, which is empty when it starts: most of the time of many tests
    would be the same profiles.
    """
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        os.environ["OUTSIZE_CACHE"] = worker[_CACHE]
        return
    folder = tempfile.TemporaryDirectory(prefix="outsize-tests-")
    config.add_cleanup(folder.cleanup)
    os.environ["OUTSIZE_CACHE"] = config.stash[_FOLDER] = folder.name


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Of xdist, in the process that starts the workers."""
    node.workerinput[_CACHE] = node.config.stash[_FOLDER]


@pytest.fixture
def _profiles_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of profiling, and for those that change what a profile would see without the cache's key showing it."""
    monkeypatch.setenv("OUTSIZE_CACHE", "")


@pytest.fixture(scope="session")
def _fake_traces() -> dict[Any, Any]:
    return {}


@pytest.fixture
def one_trace(monkeypatch: pytest.MonkeyPatch, _fake_traces: dict[Any, Any]) -> None:
    """Forecasts of equal models and batches share their profiles, on machines of equal speed. For forecasts without a
    method and without data.
    """
    from outsize.forecast.fake_trace import fake_trace

    def traced(config: Any, spec: Any, *, bind: Any, batch: Any, **how: Any) -> Any:
        assert batch is None
        speed = dataclasses.replace(spec, name="", gpu_bytes=0, host_bytes=0)
        model = json.dumps(config.to_dict(), sort_keys=True, default=str)
        key = (type(config), model, speed, repr(how))
        if key not in _fake_traces:
            _fake_traces[key] = fake_trace(config, spec, bind=bind, batch=batch, **how)
        return _fake_traces[key]

    monkeypatch.setattr("outsize.forecast.forecast.fake_trace", traced)


@pytest.fixture
def _profiles_of_this_test(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each test profiles its own models, each of them once."""
    monkeypatch.setenv("OUTSIZE_CACHE", str(tmp_path_factory.mktemp("profiles")))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if (
        not HAS_HYPOTHESIS
        and collection_path.suffix == ".py"
        and "from hypothesis" in collection_path.read_text()
        and collection_path != Path(__file__)
    ):
        return True
    return None  # leaves the decision to pytest


def _freeze() -> None:
    """Take modules and cached results out of later garbage collections. `prepare` collects garbage, and would visit
    half a million of these objects each time.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    _freeze()


_num_finished = itertools.count(1)


def pytest_runtest_logfinish() -> None:
    """Tests import parts of transformers and fill caches."""
    if next(_num_finished) % 20 == 0:
        _freeze()


def pytest_report_header() -> list[str]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none, tests marked gpu are left out"
    return [f"torch {torch.__version__}, GPU: {gpu}"] + (
        [] if HAS_HYPOTHESIS else ["hypothesis is not installed: files with property tests are left out"]
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of CUDA where there is none, so that the list of skipped tests shows missing packages alone."""
    if not torch.cuda.is_available():
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(autouse=True)
def _same_seed_for_every_test() -> None:
    """No test depends on which tests ran before it in the same process."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
