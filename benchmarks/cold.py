"""Time to a plan, without and with a cached profile: `PYTHONPATH=src python -m benchmarks.cold --model llama-8b
--gpu-memory 24GiB`.

Without a cache: profiling run and search. With it: reading the profile and the search. Building the model, the CUDA
context and allocations of the engine are not included.
"""

import argparse
import os
import sys
import tempfile
import time

import torch

from benchmarks.measure import complete
from benchmarks.shapes import random_batches, random_shape
from outsize.device.choose import choose_device
from outsize.optim.adamw import AdamW
from outsize.setup.prepare import preview


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--gpu-memory", default="24GiB")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=1024)
    args = parser.parse_args()
    device = choose_device(args.device)
    bench = complete(
        model=args.model, device=args.device, micro_batch=args.micro_batch, seq=args.seq, gpu_memory=args.gpu_memory
    )
    model, weights = random_shape(bench.model, seq=bench.seq)
    batch = random_batches(model, bench, number=1)[0]
    torch.zeros(1, device=device.torch_device)
    print(f"{device.spec.name}, torch {torch.__version__}, {' '.join(sys.argv)}")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OUTSIZE_CACHE"] = folder
        for what in ("cold", "trace kept"):
            started = time.perf_counter()
            planned = preview(
                model,
                batch,
                optimizer=AdamW(update=bench.update),
                gpu_memory=bench.gpu_memory,
                device=device,
                weights=weights,
            )
            print(f"{what:<10} {time.perf_counter() - started:6.2f} s; {planned.plan.search}")


if __name__ == "__main__":
    main()
