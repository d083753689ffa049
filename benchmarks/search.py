"""Time of the search for 80 layers of 4 chunks each, on one core, over a range of budgets: `python
benchmarks/search.py`.

A 70B-like shape is traced without weights; only the search is timed. Written to results/search.json with the machine
and versions.
"""

import datetime
import json
import platform
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig

from outsize.base.errors import PlanInfeasible
from outsize.forecast.fake_trace import fake_trace
from outsize.hardware.catalog import lookup
from outsize.hardware.gpu_budget import GpuBudget
from outsize.layout.chunks import pack
from outsize.optim.adamw import AdamW
from outsize.planner.search import search

GiB = 2**30


def main() -> None:
    torch.set_num_threads(1)
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    spec = lookup("a100-80gb")
    graph, trace, _ = fake_trace(config, spec, rows=1, tokens=2048, dtype=torch.bfloat16)
    layout = pack(graph, 512 * 2**20)
    per_layer = len([c for c in layout.chunks if c.calls == (1,)])
    print(f"{len(graph.calls) - 2} layers of {per_layer} chunks, {len(layout.chunks)} chunks in all")
    rows = []
    for gpu in (4, 8, 16, 24, 40, 80, 400, 2000):
        for accumulate in (1, 4):
            start = time.perf_counter()
            try:
                plan = search(
                    graph,
                    layout,
                    trace,
                    spec,
                    AdamW().step_config(accumulate),
                    gpu=GpuBudget(total_bytes=gpu * GiB),
                    host_bytes=4000 * GiB,
                )
                words = plan.search
            except PlanInfeasible as error:
                words = str(error)
            rows.append(
                {
                    "gpu_gib": gpu,
                    "accumulate": accumulate,
                    "seconds": round(time.perf_counter() - start, 3),
                    "search": words,
                }
            )
            print(rows[-1]["gpu_gib"], "GiB, accumulate", accumulate, rows[-1]["seconds"], "s;", words[:110])
    facts = {
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/search.py",
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "machine": f"{platform.processor() or platform.machine()}, one core",
        "chunks": len(layout.chunks),
        "layers": len(graph.calls) - 2,
        "chunks_per_layer": per_layer,
        "rows": rows,
    }
    path = Path(__file__).parent / "results" / "search.json"
    path.write_text(json.dumps(facts, indent=1) + "\n")
    print(f"longest {max(row['seconds'] for row in rows)} s; written to {path}")


if __name__ == "__main__":
    main()
