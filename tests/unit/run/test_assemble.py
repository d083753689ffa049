"""What a run is assembled from: the plan's batch is the largest that the data can produce."""

import io
from pathlib import Path

import folders
import pytest
from rich.console import Console

from outsize.base.errors import ConfigError
from outsize.config.read import read_config
from outsize.run.assemble import assemble
from outsize.run.train import preview_run


@pytest.mark.parametrize(("keys", "tokens"), [({}, 47), ({"pad_to_sequence_len": True}, 96), ({"val_set_size": 4}, 47)])
def test_the_plan_is_for_the_longest_row_of_the_data(tmp_path: Path, keys: dict[str, object], tokens: int) -> None:
    yaml = folders.write_run(tmp_path, kind="one-block", sequence_len=96, **keys)
    console = Console(record=True, width=160, file=io.StringIO())
    planned = preview_run(read_config(yaml), console)
    assert planned.plan.inputs["input_ids"] == (2, tokens)
    shown = console.export_text(clear=False)
    assert "GPU" not in shown and "weights cpu" in shown and "outsize plan --legend" in shown
    said = f"planned for {tokens} tokens, the longest row of the data; sequence_len is 96"
    assert (said in console.export_text()) == (tokens < 96)


def test_an_evaluation_row_that_is_longer_than_all_training_rows_counts(tmp_path: Path) -> None:
    data = tmp_path / "eval.jsonl"
    data.write_text('{"text": "' + "a" * 70 + '"}\n')
    yaml = folders.write_run(tmp_path, kind="one-block", sequence_len=96, test_datasets=[str(data)])
    assert assemble(read_config(yaml)).longest_row == 71


def test_gpu_memory_without_a_gpu_is_refused_if_the_cpu_has_less(tmp_path: Path) -> None:
    yaml = folders.write_run(tmp_path, kind="one-block", gpu_memory="900TiB")
    with pytest.raises(ConfigError, match=r"the run uses no GPU but the CPU, which has .* Leave gpu_memory out"):
        preview_run(read_config(yaml), Console(file=io.StringIO()))
