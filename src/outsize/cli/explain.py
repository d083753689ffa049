"""`outsize explain`: why this plan, what the usual recipes would take, and what a better machine would be worth."""

from outsize.cli.options import (
    Accumulate,
    BatchSize,
    ConfigPath,
    Dtype,
    GpuMemory,
    Hardware,
    HostMemory,
    ImageSize,
    MicroBatch,
    NumImages,
    SequenceLen,
    Update,
    update_mode,
)

_EXAMPLES = """Why this plan and no other? What would more memory or a faster machine be worth?
Needs a model's config alone, and some seconds.

[bold]Examples[/bold]

outsize explain ~/models/llama-8b --hardware rtx4090 --sequence-len 4096

outsize explain ~/models/llama-8b --hardware h200 --gpu-memory 24GiB --update in-backward
"""


def explain(
    model: ConfigPath,
    hardware: Hardware = "rtx4090",
    sequence_len: SequenceLen = 2048,
    micro_batch_size: MicroBatch = None,
    batch_size: BatchSize = None,
    gpu_memory: GpuMemory = None,
    host_memory: HostMemory = None,
    accumulate: Accumulate = None,
    dtype: Dtype = "bfloat16",
    update: Update = "after-step",
    images: NumImages = None,
    image_size: ImageSize = 1024,
) -> None:
    mode = update_mode(update)
    from outsize.forecast.forecast import plan as forecast
    from outsize.runtime.optimizer import AdamW

    made = forecast(
        model,
        sequence_len=sequence_len,
        micro_batch_size=micro_batch_size,
        batch_size=batch_size,
        hardware=hardware,
        gpu_memory=gpu_memory,
        host_memory=host_memory,
        accumulate=accumulate,
        dtype=dtype,
        optimizer=AdamW(update=mode),
        images=images,
        image_size=image_size,
    )
    print(made)
    print(f"\n{made.explain()}")


explain.__doc__ = _EXAMPLES
