"""`outsize train` with each format, on a tiny model, and the batches that it trains on, token by token."""

import json
from pathlib import Path
from typing import Any

import folders
import pytest
from typer.testing import CliRunner

from outsize.cli.main import app
from outsize.config.read import read_config
from outsize.data.rows import IGNORED
from outsize.run.assemble import assemble

TEXTS = ("the cat", "sat on a mat")
MESSAGES = [{"role": "user", "content": TEXTS[0]}, {"role": "assistant", "content": TEXTS[1]}]
FORMATS: dict[str, dict[str, Any]] = {
    "alpaca_instruct.load_no_prompt": {"instruction": TEXTS[0], "input": "", "output": TEXTS[1]},
    "prompt_completion": {"prompt": TEXTS[0], "completion": TEXTS[1]},
    "sharegpt": {"conversations": [{"from": "human", "value": TEXTS[0]}, {"from": "gpt", "value": TEXTS[1]}]},
    "chat_template": {"messages": MESSAGES * 2},
    "input_output": {"segments": [{"label": False, "text": TEXTS[0]}, {"label": True, "text": TEXTS[1]}]},
    "completion": {"text": TEXTS[1]},
}
TURN = [("<|user|>the cat</s><|assistant|>", False), ("sat on a mat</s>", True)]
TRAINED = {
    "alpaca_instruct.load_no_prompt": [
        ("### Instruction:\nthe cat\n\n### Response:\n", False),
        ("sat on a mat</s>", True),
    ],
    "prompt_completion": [("the cat", False), ("sat on a mat</s>", True)],
    "sharegpt": TURN,
    "chat_template": TURN * 2,
    "input_output": [("the cat", False), ("sat on a mat", True)],
    "completion": [("sat on a mat</s>", True)],
}
"""The parts of a row, and whether they are trained."""


def write(path: Path, row: dict[str, Any]) -> None:
    rows = [row] * 8
    if path.suffix == ".parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [
        ("alpaca_instruct.load_no_prompt", ".jsonl"),
        *(
            pytest.param(kind, suffix, marks=pytest.mark.full)
            for suffix in (".jsonl", ".parquet")
            for kind in FORMATS
            if (kind, suffix) != ("alpaca_instruct.load_no_prompt", ".jsonl")
        ),
    ],
)
def test_a_run_trains_with_the_format(tmp_path: Path, kind: str, suffix: str) -> None:
    data = tmp_path / f"rows{suffix}"
    write(data, FORMATS[kind])
    run = folders.write_run(tmp_path, datasets=[{"path": str(data), "type": kind}], sequence_len=96, max_steps=6)
    trainer = assemble(read_config(run)).trainer
    batch = next(iter(trainer.get_train_dataloader()))
    parts = [(trainer.processing_class(text)["input_ids"], is_trained) for text, is_trained in TRAINED[kind]]
    assert batch["input_ids"].tolist() == 2 * [[token for ids, _ in parts for token in ids]]
    labels = [token if is_trained else IGNORED for ids, is_trained in parts for token in ids]
    assert batch["labels"].tolist() == 2 * [labels]
    done = CliRunner().invoke(app, ["train", str(run)])
    assert done.exit_code == 0, done.output
    history = json.loads((tmp_path / "out" / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert len(losses) == 6 and losses[-1] < losses[0]
