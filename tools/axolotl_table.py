"""Writes docs/axolotl.md from the table of keys: `python -m tools.axolotl_table`. A test compares the two."""

from itertools import groupby
from pathlib import Path
from textwrap import fill

from outsize.base.records import fields_by_key
from outsize.config.keys import AXOLOTL, SHARED, OtherKey
from outsize.config.run import RunConfig

PAGE = Path(__file__).parent.parent / "docs" / "axolotl.md"
_HEAD = """# Run files of Axolotl

`outsize train` reads Axolotl's YAML files. [config.md](config.md) describes the keys that mean the same in both;
the tables list the others. This page is generated from `config/keys.py` by `python -m tools.axolotl_table`.

- A key that is off (no value, false, zero or empty; 1 for a number of GPUs) is ignored silently.
- Keys without effect are listed in one line at the start of a run.
- Keys that cannot be honored are refused, with the nearest way.
- A file is taken for Axolotl's if it has a key that only Axolotl has, on or off: one of the second table. It then has
  Axolotl's default `excess_length_strategy: drop` (for `completion` data Axolotl splits, and so does outsize),
  `early_stopping_patience` implies `load_best_model_at_end`, and settings of an adapter or of evaluation have no effect
  if there is no adapter or no evaluation data. With `lr_scheduler: constant`, a warmup has no effect.
- `optimizer: adamw_bnb_8bit`, `paged_adamw_8bit` and the like run as exact AdamW. The state takes 10 bytes per trained
  parameter, in host memory where the plan does not keep it on the GPU.
- One GPU only: files for several are refused. `adapter: qlora` and `load_in_8bit` need bitsandbytes
  ([quantized bases](lora.md#quantized-bases)).
"""


def _rows(table: dict[str, OtherKey]) -> str:
    lines = ["| key | here |", "|---|---|"]
    for row, keys in groupby(table, key=lambda key: table[key]):
        names = ", ".join(f"`{key}`" for key in keys)
        text = f"`{row.text}`" if row.action == "renamed" else f"{row.action}: {row.text}"
        lines.append(f"| {names} | {text.rstrip('.')} |")
    return "\n".join(lines)


def page() -> str:
    ours = fill(", ".join(f"`{key}`" for key in fields_by_key(RunConfig)), 120, break_on_hyphens=False)
    sections = {
        "Keys that mean the same in outsize": ours,
        "Keys of several tools": _rows(SHARED),
        "Keys of Axolotl": _rows(AXOLOTL),
    }
    return "\n".join([_HEAD, *(f"## {title}\n\n{text}\n" for title, text in sections.items())])


if __name__ == "__main__":
    PAGE.write_text(page())
