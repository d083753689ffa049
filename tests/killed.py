"""A run that can be killed, in a process of its own: `python tests/killed.py run.yaml record.jsonl --at 7` (or
`--in-save 25`, `--set key=value`). One that is not to be killed may go in the caller's: `main([...])`.

Writes a line for every micro-batch (step, token ids) and for every logged loss. Killing is SIGKILL to itself: at the
end of a step, or at the third `fsync` of a save, when files are written and the folder is not yet there.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import trainers
from transformers import TrainerCallback

from outsize.config.read import read_config
from outsize.run.assemble import RunTrainer, assemble, start


class Record(TrainerCallback):
    def __init__(self, path: Path, kill_at: int | None, kill_in_save: int | None):
        self._file = path.open("a")
        self._at, self._in_save = kill_at, kill_in_save

    def write(self, **facts: Any) -> None:
        self._file.write(json.dumps(facts) + "\n")
        self._file.flush()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.write(step=state.global_step, loss=logs["loss"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._at:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.global_step == self._in_save:
            plain, left = os.fsync, [3]

            def fsync(fd: int) -> None:
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                plain(fd)

            os.fsync = fsync


def watch_batches(trainer: RunTrainer, record: Record) -> None:
    inner = trainer.training_step

    def training_step(model: Any, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        record.write(step=trainer.state.global_step + 1, ids=inputs["input_ids"].tolist())
        return inner(model, inputs, *args, **kwargs)

    trainer.training_step = training_step


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("record", type=Path)
    parser.add_argument("--at", type=int)
    parser.add_argument("--in-save", type=int)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    asked = parser.parse_args(arguments)
    config = read_config(asked.run, asked.overrides)
    assembled = assemble(config)
    with trainers.closing(assembled.trainer) as trainer:
        start(assembled, config)
        record = Record(asked.record, asked.at, asked.in_save)
        trainer.add_callback(record)
        watch_batches(trainer, record)
        record.write(process=os.getpid())
        trainer.train(str(assembled.checkpoint) if assembled.checkpoint else None)
        trainer.save_model()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
