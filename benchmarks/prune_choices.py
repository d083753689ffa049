"""Cases of `benchmarks.prune` that begin with a library: scores, predicted costs, and distillation."""

import dataclasses
import gc
import io
import itertools
import json
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.prune_cases import TINY_DEVICE, GiB, _wait, models
from benchmarks.prune_models import model_folder, run_config
from benchmarks.shapes import named_config
from outsize.config.prune_target import PruneTarget
from outsize.config.run import RunConfig
from outsize.methods.bypass import score
from outsize.methods.bypass.choose import Choice, Limit, Option
from outsize.methods.bypass.costs import Use
from outsize.run import prune_choice
from outsize.run.content_hash import rows_hash
from outsize.run.distill_batches import DistillBatches
from outsize.run.inputs import BatchOrder, load_inputs
from outsize.run.prune import prune_run
from outsize.run.prune_assemble import Assembly
from outsize.run.prune_choice import Choosing
from outsize.run.prune_importance import StoredImportance
from outsize.run.prune_library import Library
from outsize.run.prune_scores import Pick, Scoring, Variants
from outsize.run.prune_setup import set_up
from outsize.run.teacher import Teacher
from outsize.run.teacher_hidden import DATA, THREADS, TeacherHidden, write_hidden
from outsize.run.train import train_run
from outsize.transfer.batch_cache import BatchCache

FEW = 8
"""Layers of the 8B shape that are scored and distilled."""
_ROWS, _SEQ = 8, 1024


def _config(name: str, *, tiny: bool, layers: int | None, **prune: Any) -> RunConfig:
    shape = "tiny" if tiny else "llama-8b"
    few = None if layers is None else (3 if tiny else layers)
    model = model_folder(models() / (shape if few is None else f"{shape}-{few}"), shape, layers=few)
    rows, seq = (2, 16) if tiny else (_ROWS, _SEQ)
    variants: dict[str, Any] = {"intermediate_size": [11520, 8704, 5888, 3072], "num_key_value_heads": [4, 2, 1]}
    if tiny:
        variants = {"intermediate_size": [0.6, 0.2], "num_key_value_heads": [1]}
    given = {**variants, "tokens": 2 * rows * seq, "importance": "truncate", "score_tokens": 2 * rows * seq, **prune}
    return run_config(
        models() / f"run-{name}",
        model,
        rows=rows,
        seq=seq,
        tokens=2 * rows * seq,
        device=TINY_DEVICE if tiny else None,
        gpu_memory=None if tiny else "24GiB",
        prune=given,
    )


def scores_case(*, tiny: bool) -> dict[str, Any]:
    """All replacements in one pass, and some of them in a pass of their own."""
    config = _config("scores", tiny=tiny, layers=FEW)
    prune_run(config, Console(file=io.StringIO()))
    setup, folder = set_up(config), Path(config.output_dir)
    assert config.prune is not None
    try:
        variants = Variants(setup, Library(folder), StoredImportance(setup, folder))
        scoring = Scoring(variants, config.prune.score_tokens, None)
        picks = [Pick(layer, variant) for layer, each in setup.variants.items() for variant in each]
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        whole = _scored(scoring, picks)
        reserved = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None
        singles = [_scored(scoring, [pick]) for pick in picks[:: max(1, len(picks) // 4)]][:4]
    finally:
        setup.teacher.close()
        shutil.rmtree(folder)  # gigabytes
    layers, each = len(setup.stack.layers), len(picks) // len(setup.stack.layers)
    run_s = (whole["pass_s"] - whole["load_s"] - whole["make_s"] - whole["cache_s"]) / _runs(layers, each)
    load_s, make_s = whole["load_s"] / layers, whole["make_s"] / len(picks)
    head_s = whole["compare_s"] / (1 + len(picks))
    single_s = sum(one["all_s"] for one in singles) / len(singles)
    full = named_config("tiny" if tiny else "llama-8b").num_hidden_layers
    of_one = full * run_s + head_s + make_s
    cache_s = whole["cache_s"] / (1 + len(picks))
    one_pass_s = full * load_s + _runs(full, each) * run_s + full * each * make_s
    one_pass_s += (1 + full * each) * (head_s + cache_s)
    return {
        "tokens": scoring.tokens,
        "layers": f"{layers} of {full}, extrapolated",
        "replacements": len(picks),
        "one_pass_s": whole["all_s"],
        "each_alone_s": single_s * len(picks),
        "layer_run_s": run_s,
        "head_s": head_s,
        "load_layer_s": load_s,
        "make_variant_s": make_s,
        "cache_s": whole["cache_s"],
        "gpu_reserved_gib": None if reserved is None else reserved / GiB,
        "all_layers_one_pass_s": one_pass_s,
        "all_layers_each_alone_s": full * each * (of_one + full * load_s),
        "all_layers_each_alone_resident_s": full * each * of_one,
    }


def _runs(layers: int, variants: int) -> int:
    """Runs of a layer in one pass: of the teacher and of each replacement from its own layer on."""
    return layers + variants * layers * (layers + 1) // 2


def _scored(scoring: Scoring, picks: list[Pick]) -> dict[str, float]:
    """Seconds of one call, and of its stages."""
    found = dict.fromkeys(("pass_s", "compare_s", "load_s", "make_s", "cache_s"), 0.0)

    def timed(key: str, function: Any) -> Any:
        def call(*args: Any, **settings: Any) -> Any:
            started = time.perf_counter()
            value = function(*args, **settings)
            _wait()
            found[key] += time.perf_counter() - started
            return value

        return call

    with ExitStack() as stack:
        for owner, name, key in (
            (score, "_pass", "pass_s"),
            (score, "_compare", "compare_s"),
            (Teacher, "load", "load_s"),
            (Teacher, "place", "load_s"),
            (Variants, "student", "make_s"),
            (BatchCache, "__init__", "cache_s"),
        ):
            before = getattr(owner, name)
            stack.callback(setattr, owner, name, before)
            setattr(owner, name, timed(key, before))
        started = time.perf_counter()
        scoring.of({pick.name: (pick,) for pick in picks}, lambda done, total: None)
        _wait()
    return {"all_s": time.perf_counter() - started, **found}


def costs_case(*, tiny: bool) -> dict[str, Any]:
    """Predicted parameters, memory and latency of the teacher and of a chosen model, against models that are built."""
    config = _config("costs", tiny=tiny, layers=None)
    use = Use(batch=1, context=32, decoded=8) if tiny else Use(batch=1, context=4096, decoded=256)
    setup, folder = set_up(config), Path(config.output_dir)
    try:
        names = [f"{layer:03d}/{variant.name}" for layer, each in setup.variants.items() for variant in each]
        scores = dict.fromkeys(names, 1.0)
        started = time.perf_counter()
        choosing = Choosing(setup, scores, use, timed=True)
        measured_s = time.perf_counter() - started
        with ExitStack() as stack:
            stack.callback(setattr, prune_choice, "choose", prune_choice.choose)
            prune_choice.choose = _mixed
            chosen = choosing.choose(PruneTarget(params={"max_share": 0.7}))
        variants = Variants(setup, Library(folder), StoredImportance(setup, folder))
        design = Assembly(variants, chosen.variants, choosing.places)._design(None)
        teacher: Any = setup.stack.model
        made = {"teacher": (type(teacher), teacher.config), "chosen": (type(design.model), design.model.config)}
        device, dtype = setup.device, teacher.dtype
    finally:
        setup.teacher.close()
    del variants, design, teacher, choosing, setup
    gc.collect()
    found: dict[str, Any] = {"costs_s": measured_s}
    for name, predicted in (("teacher", chosen.teacher), ("chosen", chosen.predicted)):
        kind, of_model = made[name]
        built = _built(kind, of_model, dtype, device.torch_device, use)
        for key, value in built.items():
            found[f"{name}_{key}"] = value
        for key, cost in (("params", "params"), ("memory_gib", "memory"), ("latency_s", "latency")):
            scale = GiB if cost == "memory" else 1
            found[f"planned_{name}_{key}"] = predicted[cost] / scale
    return found


def _mixed(options: Sequence[Option], limits: Sequence[Limit], *, time_limit: float = 0.0) -> Choice:
    """Something from all variants, without a solver, which the machine may not have."""
    groups: dict[str, list[Option]] = {}
    for option in options:
        groups.setdefault(option.group, []).append(option)
    picks = [some[number // 2 % len(some)] for number, some in enumerate(groups.values())]
    costs: dict[str, float] = {}
    for pick in picks:
        for name, value in pick.costs.items():
            costs[name] = costs.get(name, 0.0) + value
    return Choice({pick.group: pick.name for pick in picks}, 0.0, costs, 0.0)


@torch.no_grad()
def _built(kind: Any, config: Any, dtype: torch.dtype, device: torch.device, use: Use) -> dict[str, float]:
    """Of a model with random weights: parameters, bytes of weights and cache, and seconds of a use."""
    on_gpu = device.type == "cuda"
    gc.collect()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    with device:
        model = kind._from_config(config, dtype=dtype).eval()
    ids = torch.zeros(use.batch, use.context, dtype=torch.long, device=device)
    seconds, memory = [], 0.0
    for _ in range(3):
        _wait()
        started = time.perf_counter()
        past = model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
        for _ in range(use.decoded):
            past = model(input_ids=ids[:, :1], past_key_values=past, use_cache=True).past_key_values
        _wait()
        seconds.append(time.perf_counter() - started)
        kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in past.layers)
        weights = sum(param.nbytes for param in model.parameters())
        memory = float(torch.cuda.memory_allocated() - before if on_gpu else weights + kept)
        del past
    params = sum(param.numel() for param in model.parameters())
    return {"params": params, "memory_gib": memory / GiB, "latency_s": min(seconds)}


def distill_case(*, tiny: bool) -> dict[str, Any]:
    """Training of a student's shape under a budget: alone, with a teacher whose layers are streamed, and with one whose
    last hidden states are on disk (random ones: their values do not change the speed).
    """
    shape, layers = ("tiny", 3) if tiny else ("llama-8b", FEW)
    teacher = model_folder(models() / f"{shape}-{layers}", shape, layers=layers)
    width, heads = (192, 1) if tiny else (8704, 4)
    folder = models() / f"{shape}-{layers}-student"
    student = model_folder(folder, shape, layers=layers, intermediate_size=width, num_key_value_heads=heads)
    rows, seq, steps = (2, 16, 2) if tiny else (_ROWS, _SEQ, 10)
    found: dict[str, Any] = {"layers": f"{layers} of {named_config(shape).num_hidden_layers}", "tokens": rows * seq}
    with_teacher = {"teacher_model": str(teacher)}
    sequential = {**with_teacher, "train_sampling_strategy": "sequential"}
    for name, keys in (("plain", {}), ("streamed", with_teacher), ("distilled", sequential)):
        config = run_config(
            models() / f"run-{name}",
            student,
            rows=rows,
            seq=seq,
            tokens=rows * seq * steps,
            device=TINY_DEVICE if tiny else None,
            gpu_memory=None if tiny else "24GiB",
            max_steps=steps,
            save_strategy="no",
            **keys,
        )
        config = dataclasses.replace(config, notes=())
        batches = _with_hidden(config, teacher, steps) if name == "distilled" else None
        outcome = train_run(config, Console(file=io.StringIO()), batches)
        found[f"{name}_tokens_per_s"] = outcome.tokens_per_second
        found[f"{name}_gpu_peak_gib"] = outcome.gpu_peak_bytes / GiB
        gc.collect()
        shutil.rmtree(config.output_dir)
    return found


def _with_hidden(config: RunConfig, teacher: Path, num_batches: int) -> DistillBatches:
    """Batches whose hidden states are on disk."""
    rows = load_inputs(config).train
    order = BatchOrder(num_rows=len(rows), rows_per_batch=config.micro_batch_size or 1, seed=0, is_sequential=True)
    shape = (
        order.rows_per_batch,
        config.sequence_len,
        json.loads((teacher / "config.json").read_text())["hidden_size"],
    )
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    made_from = {DATA: rows_hash(rows), THREADS: None if torch.cuda.is_available() else torch.get_num_threads()}
    place = Path(config.output_dir).with_name("teacher-hidden")
    write_hidden(place, made_from, itertools.repeat(drawn, num_batches), num_batches * drawn.nbytes)
    return DistillBatches(order=order, num_batches=num_batches, hidden=TeacherHidden.open(place))
