"""Weights in files: matched by name under any alias, refused by name, read once into place; training from them has the
same bits and no second copy.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cells
import pytest
import torch
import zoo
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import outsize
from outsize.base.errors import BadFile, ModelUnsupported
from outsize.checkpoint.model_files import INDEX, SINGLE
from outsize.model.weights import FileWeights, is_unmaterialized, unmaterialize, weight_files

SPEC = outsize.AdamW(lr=1e-2, weight_decay=0.1)
STEPS = 3


def emptied(model: nn.Module) -> nn.Module:
    """The same model with its parameters on meta; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, param in module._parameters.items():
            if param is not None:
                module._parameters[key] = made.setdefault(
                    id(param), nn.Parameter(param.detach().to("meta"), param.requires_grad)
                )
    return model


def write(folder: Path, model: nn.Module, *, shard: str | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    else:
        state = model.state_dict()
        names = [name for name, _ in (*model.named_parameters(), *model.named_buffers()) if name in state]
        save_file({name: state[name].contiguous() for name in names}, folder / SINGLE)
    return folder


# --- unmaterialized


def test_a_hollow_model_has_shapes_and_ties_and_no_memory() -> None:
    full = zoo.make("llama", torch.bfloat16)
    full.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
    model = unmaterialize(emptied(zoo.make("llama", torch.bfloat16)))
    assert [(n, p.shape, p.dtype, p.device) for n, p in model.named_parameters()] == [
        (n, p.shape, p.dtype, p.device) for n, p in full.named_parameters()
    ]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(is_unmaterialized(p) and p.untyped_storage().nbytes() == 0 for p in model.parameters())
    frozen = emptied(full)
    assert [p.requires_grad for p in unmaterialize(frozen).parameters()] == [
        n != "model.layers.1.mlp.up_proj.weight" for n, _ in frozen.named_parameters()
    ]


def test_what_has_memory_or_needs_none_is_not_hollow() -> None:
    module = nn.Module()
    module.register_parameter("empty", nn.Parameter(torch.empty(0, 4, device="meta")))
    module.register_parameter("real", nn.Parameter(torch.ones(2)))
    module.register_parameter("absent", None)
    real = module.real
    assert (
        unmaterialize(module).real is real
        and not is_unmaterialized(real)
        and not is_unmaterialized(module.empty)
        and module.empty.device.type == "cpu"
    )


# --- matching


@pytest.mark.parametrize("kind", ["llama", "llama-untied", "gpt2", "t5", "bert", "plain", "mixed"])
@pytest.mark.parametrize("shard", [None, "20KB"])
def test_every_weight_is_found_and_read_as_it_was_saved(tmp_path: Path, kind: str, shard: str | None) -> None:
    full = zoo.make(kind, torch.bfloat16)
    weights = FileWeights(write(tmp_path, full, shard=shard), emptied(zoo.make(kind, torch.bfloat16)))
    assert shard is None or not hasattr(full, "save_pretrained") or len(weight_files(tmp_path)) > 3
    assert weights.missing == [] and weights.unexpected == [] and weights.untied() == []
    weights.require_whole()
    for name, param in full.named_parameters():
        weights.read_into(name, into := torch.empty_like(param))
        assert torch.equal(into, param), name
    weights.close()


@pytest.mark.parametrize("alias", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_tied_weight_is_found_under_any_of_its_names(tmp_path: Path, alias: str) -> None:
    model = zoo.make("llama")
    state = {
        name: value.contiguous()
        for name, value in model.state_dict().items()
        if name not in ("lm_head.weight", "model.embed_tokens.weight")
    }
    save_file({**state, alias: model.lm_head.weight.detach()}, tmp_path / SINGLE)
    weights = FileWeights(tmp_path, emptied(zoo.make("llama")))
    weights.require_whole()
    weights.read_into("model.embed_tokens.weight", into := torch.empty_like(model.lm_head.weight))
    assert torch.equal(into, model.lm_head.weight)


def test_a_tied_weight_that_the_files_have_twice_must_be_one(tmp_path: Path) -> None:
    model = zoo.make("llama")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    save_file(state, tmp_path / SINGLE)
    FileWeights(tmp_path, emptied(zoo.make("llama"))).require_whole()
    state["lm_head.weight"][0, 0] += 1
    save_file(state, tmp_path / SINGLE)
    with pytest.raises(BadFile, match=r"that the model ties: lm_head\.weight.*tie_word_embeddings=False"):
        FileWeights(tmp_path, emptied(zoo.make("llama"))).require_whole()
    FileWeights(tmp_path, emptied(zoo.make("llama-untied"))).require_whole()


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    state = load_file(write(tmp_path, zoo.make("llama-untied")) / SINGLE)
    lost = ["model.layers.2.mlp.up_proj.weight", "lm_head.weight"]
    save_file({name: value for name, value in state.items() if name not in lost}, tmp_path / SINGLE)
    weights = FileWeights(tmp_path, emptied(zoo.make("llama-untied")))
    assert weights.missing == lost
    with pytest.raises(BadFile, match=rf"{tmp_path} lacks {lost[0]}, {lost[1]}"):
        weights.require_whole()


def test_unexpected_tensors_are_named_and_left_where_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = load_file(write(tmp_path, zoo.make("gpt2")) / SINGLE)
    extra = {
        "tower.weight": torch.ones(2),
        "transformer.h.0.attn.bias": torch.ones(2),
    }  # the second is one that GPT-2's class says to ignore
    save_file({**state, **extra}, tmp_path / SINGLE)
    weights = FileWeights(tmp_path, emptied(zoo.make("gpt2")))
    weights.require_whole()
    assert weights.unexpected == ["tower.weight"] and any(
        "no place for: tower.weight" in text for text in caplog.messages
    )


def test_another_shape_is_named_with_both(tmp_path: Path) -> None:
    state = load_file(write(tmp_path, zoo.make("llama")) / SINGLE)
    state["model.norm.weight"] = torch.ones(33)
    save_file(state, tmp_path / SINGLE)
    with pytest.raises(
        BadFile, match=rf"{tmp_path / SINGLE}: model\.norm\.weight has the shape \(33,\), but \(32,\) in the model"
    ):
        FileWeights(tmp_path, emptied(zoo.make("llama")))


@pytest.mark.parametrize(
    ("there", "here"),
    [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
)
def test_another_dtype_is_converted_as_tensor_to_does(tmp_path: Path, there: torch.dtype, here: torch.dtype) -> None:
    full = zoo.make("llama", there)
    weights = FileWeights(write(tmp_path, full), emptied(zoo.make("llama", here)))
    for name, param in full.named_parameters():
        weights.read_into(name, into := torch.empty(param.shape, dtype=here))
        assert torch.equal(into, param.to(here)), name


# --- buffers


class Norms(zoo.PlainModel):
    """Has running statistics, a table that it makes itself, and one tensor under two names."""

    def __init__(self) -> None:
        super().__init__(num_blocks=3, loops=1, tied=True)
        self.stats = nn.BatchNorm1d(zoo.HIDDEN, affine=False)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("scale", torch.tensor(1.0))
        self.register_buffer("scale_again", self.scale)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        self.stats(self.embed(input_ids).reshape(-1, zoo.HIDDEN).to(self.stats.running_mean.dtype))
        return super().forward(input_ids, labels)


def norms(seed: int = 0) -> Norms:
    torch.manual_seed(seed)
    model = Norms()
    model.stats.running_mean.normal_()
    model.stats.num_batches_tracked.fill_(seed)
    model.scale.fill_(seed)
    return model


def test_buffers_are_filled_but_for_those_that_a_model_makes_itself(tmp_path: Path) -> None:
    full = norms(5)
    write(tmp_path, full)
    save_file({**load_file(tmp_path / SINGLE), "table": torch.zeros(4)}, tmp_path / SINGLE)
    model = emptied(norms(1))
    weights = FileWeights(tmp_path, model)
    weights.require_whole()
    weights.fill_buffers(model)
    assert weights.unexpected == ["table"]
    assert torch.equal(model.stats.running_mean, full.stats.running_mean) and int(model.stats.num_batches_tracked) == 5
    assert float(model.scale) == 5 and model.scale is model.scale_again and torch.equal(model.table, torch.arange(4.0))


def test_buffers_that_the_files_lack_stay_as_they_were_made_and_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = load_file(write(tmp_path, norms(5)) / SINGLE)
    save_file({name: value for name, value in state.items() if "running_mean" not in name}, tmp_path / SINGLE)
    model = emptied(norms(1))
    weights = FileWeights(tmp_path, model)
    weights.require_whole()
    weights.fill_buffers(model)
    assert torch.equal(model.stats.running_mean, norms(1).stats.running_mean) and any(
        "stats.running_mean" in text for text in caplog.messages
    )


def test_a_buffer_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    state = load_file(write(tmp_path, norms()) / SINGLE)
    save_file({**state, "stats.running_mean": torch.ones(3)}, tmp_path / SINGLE)
    with pytest.raises(BadFile, match=r"stats\.running_mean has the shape"):
        FileWeights(tmp_path, emptied(norms()))


def test_a_model_with_buffers_trains_from_files_as_it_does_from_memory(tmp_path: Path) -> None:
    write(tmp_path, norms(5))
    data = cells.batches("plain", 3)
    plain = norms(5)
    expected = cells.plain(plain, data, spec=SPEC, steps=STEPS)
    model = emptied(norms(1))
    with cells.closing(
        outsize.prepare(model, data[0], optimizer=SPEC, device="sim:64MiB", chunk_bytes="8KiB", weights=tmp_path)
    ) as engine:
        cells.assert_same(
            cells.train(model, engine.optimizer, data, steps=STEPS, accumulate=1, engine=engine), expected
        )
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())


# --- folders


def test_a_single_file_comes_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    write(tmp_path, zoo.make("llama", seed=1), shard="20KB")
    write(tmp_path, zoo.make("llama", seed=2))
    # transformers clears the shards away but leaves their index.
    assert (tmp_path / INDEX).exists() and weight_files(tmp_path) == [tmp_path / SINGLE]


def test_an_index_that_names_a_missing_shard_is_refused_with_its_name(tmp_path: Path) -> None:
    write(tmp_path, zoo.make("llama"), shard="20KB")
    lost = weight_files(tmp_path)[1]
    lost.unlink()
    with pytest.raises(BadFile, match=rf"lacks files that .* names: {lost.name}"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "..", ".", "", "sub/a.safetensors", "a\0b", 7, None, ["a"]]
)
def test_an_index_that_leads_out_of_its_folder_is_refused(tmp_path: Path, name: Any) -> None:
    save_file({"t": torch.ones(1)}, tmp_path / "secret.safetensors")
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    save_file({"t": torch.ones(1)}, folder / "sub" / "a.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"t": name}}))
    with pytest.raises(BadFile, match=f"{folder} lacks files that"):
        weight_files(folder)


@pytest.mark.parametrize("text", ["", "{]", "[]", "{}", '{"weight_map": 3}', '{"weight_map": ["a"]}', b"\xff\xfe"])
def test_an_index_that_cannot_be_read_is_refused_by_name(tmp_path: Path, text: str | bytes) -> None:
    (tmp_path / INDEX).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BadFile, match=f"{tmp_path / INDEX} cannot be read"):
        weight_files(tmp_path)


def test_a_folder_without_weights_says_what_it_holds_instead(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="found: nothing"):
        weight_files(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(BadFile, match=r"found: pytorch_model\.bin.*save_pretrained"):
        weight_files(tmp_path)
    with pytest.raises(BadFile, match="no such folder"):
        weight_files(tmp_path / "elsewhere")


def test_shards_may_be_links_as_in_the_hubs_cache(tmp_path: Path) -> None:
    model = zoo.make("llama")
    write(tmp_path / "blobs", model, shard="20KB")
    (tmp_path / "snapshot").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    FileWeights(tmp_path / "snapshot", emptied(zoo.make("llama"))).require_whole()


def test_no_file_stays_open_when_a_folder_is_refused_or_closed(tmp_path: Path) -> None:
    write(tmp_path, zoo.make("llama"), shard="20KB")
    last = weight_files(tmp_path)[-1]
    before = os.listdir("/proc/self/fd")
    FileWeights(tmp_path, emptied(zoo.make("llama"))).close()
    with pytest.raises(BadFile):
        FileWeights(tmp_path, emptied(zoo.make("gpt2"))).require_whole()
    with pytest.raises(BadFile, match="has the shape"):
        FileWeights(tmp_path, emptied(zoo.make("qwen3", tied=True)).requires_grad_(False).apply(_widen))
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(BadFile, match=last.name):
        FileWeights(tmp_path, emptied(zoo.make("llama")))
    assert os.listdir("/proc/self/fd") == before


def _widen(module: nn.Module) -> None:
    for key, param in module._parameters.items():
        if param is not None:
            module._parameters[key] = nn.Parameter(torch.empty(*param.shape, 2, device="meta"))


# --- preparing and training


@pytest.mark.parametrize("device", ["cpu", "sim:64MiB"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.7, 0.999])
def test_a_truncated_file_is_refused_by_name_before_anything_is_touched(
    tmp_path: Path, share: float, device: str
) -> None:
    path = write(tmp_path, zoo.make("llama")) / SINGLE
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    model = emptied(zoo.make("llama"))
    with pytest.raises(BadFile, match=str(path)):
        outsize.prepare(model, zoo.batch("llama"), device=device, weights=tmp_path)
    assert all(param.is_meta for param in model.parameters())
    path.write_bytes(whole)
    outsize.prepare(model, zoo.batch("llama"), device=device, weights=tmp_path).detach()
    assert all(torch.equal(value, zoo.make("llama").state_dict()[name]) for name, value in model.state_dict().items())


def test_a_model_on_meta_without_weights_is_refused_with_what_to_give() -> None:
    with pytest.raises(ModelUnsupported, match="weights=folder"):
        outsize.prepare(emptied(zoo.make("llama")), zoo.batch("llama"), device="cpu")


PLANS: dict[str, dict[str, Any]] = {
    "resident": {
        "device": "sim:64MiB"
    },  # on `cpu` seconds are measured, and a busy machine may find another plan faster
    "streamed": {
        "device": "sim:64MiB",
        "pins": outsize.Pins(n_persist=0, n_optimizer_gpu=0, n_swap=2, n_checkpoint=1, n_buffer=1),
    },
}


SAVED = [
    ("llama", torch.bfloat16, True, None),
    ("llama", torch.float32, False, "20KB"),
    ("gpt2", torch.bfloat16, True, "20KB"),
    ("gpt2", torch.float32, False, None),
    ("t5", torch.float32, True, "20KB"),
    ("bert", torch.bfloat16, False, None),
    ("gemma2", torch.bfloat16, True, "20KB"),
    ("mixed", torch.bfloat16, True, None),
]


@pytest.mark.parametrize(
    ("kind", "dtype", "tied", "shard", "plan"),
    [  # the plans by turns, and the first under both
        pytest.param(*saved, plan, marks=[pytest.mark.full] if i and (i + i // 2 + j) % 2 else [])
        for i, saved in enumerate(SAVED)
        for j, plan in enumerate(PLANS)
    ],
)
def test_training_from_streamed_weights_equals_training_from_memory(
    tmp_path: Path, kind: str, dtype: torch.dtype, tied: bool, shard: str | None, plan: str
) -> None:
    saved = zoo.make(kind, dtype, tied, seed=3)
    write(tmp_path, saved, shard=shard)
    plain = type(saved).from_pretrained(tmp_path, dtype=dtype).train() if hasattr(saved, "from_pretrained") else saved
    assert all(torch.equal(value, saved.state_dict()[name]) for name, value in plain.state_dict().items())
    data = cells.batches(kind, 3)
    expected = cells.plain(plain, data, spec=SPEC, steps=STEPS, accumulate=2)
    model = emptied(zoo.make(kind, dtype, tied))
    engine = outsize.prepare(
        model, data[0], optimizer=SPEC, accumulate=2, chunk_bytes="8KiB", weights=tmp_path, **PLANS[plan]
    )
    with cells.closing(engine):
        assert (len(engine.runtime.place.slots.slot_of) > 3) == (plan == "streamed")
        cells.assert_same(
            cells.train(model, engine.optimizer, data, steps=STEPS, accumulate=2, engine=engine), expected
        )
    assert all(torch.equal(param, plain.get_parameter(name)) for name, param in model.named_parameters())


@pytest.mark.parametrize(("dtype", "trained_in"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)])
def test_fp16_files_train_a_model_as_their_conversion_does(
    tmp_path: Path, dtype: torch.dtype, trained_in: torch.dtype
) -> None:
    write(tmp_path, zoo.make("llama", torch.float16))
    plain = type(zoo.make("llama")).from_pretrained(tmp_path, dtype=trained_in).train()
    data = cells.batches("llama", 3)
    expected = cells.plain(plain, data, spec=SPEC, steps=STEPS)
    model = emptied(zoo.make("llama", dtype))
    with cells.closing(
        outsize.prepare(model, data[0], optimizer=SPEC, device="cpu", chunk_bytes="8KiB", weights=tmp_path)
    ) as engine:
        cells.assert_same(
            cells.train(model, engine.optimizer, data, steps=STEPS, accumulate=1, engine=engine), expected
        )


def test_frozen_and_permuted_parameters_are_streamed_too(tmp_path: Path) -> None:
    def permuted(seed: int) -> nn.Module:
        model = zoo.make("plain", seed=seed)
        model.layers[1].up.weight.data = model.layers[1].up.weight.data.t().contiguous().t()
        zoo.freeze_some(model)
        return model

    plain = permuted(3)
    write(tmp_path, plain)
    data = cells.batches("plain", 3)
    expected = cells.plain(plain, data, spec=SPEC, steps=STEPS)
    model = emptied(permuted(0))
    with cells.closing(
        outsize.prepare(model, data[0], optimizer=SPEC, chunk_bytes="8KiB", weights=tmp_path, **PLANS["streamed"])
    ) as engine:
        cells.assert_same(
            cells.train(model, engine.optimizer, data, steps=STEPS, accumulate=1, engine=engine), expected
        )


# --- host memory

SCRIPT = r"""
import json, sys
from pathlib import Path
sys.path.insert(0, "src")
import torch
from torch import nn
import outsize
from outsize.checkpoint.tensorfile import TensorSpec, TensorFile

class Residual(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(size, size, bias=False, dtype=torch.bfloat16)
    def forward(self, x):
        return x + torch.tanh(self.linear(x))

class Net(nn.Module):
    def __init__(self, size, count):
        super().__init__()
        self.layers = nn.ModuleList(Residual(size) for _ in range(count)).requires_grad_(False)  # no gradients and no state beside the weights
        self.scale = nn.Parameter(torch.ones(8))
    def forward(self, x):
        x = x * self.scale.sum().to(x.dtype)
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.float().square().mean()}

def peak():
    # Of this program alone: ru_maxrss begins with what the process held that started it.
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))

def prepared(size, count, file_dtype, **how):
    with torch.device("meta"):
        model = Net(size, count)
    specs = {name: TensorSpec(file_dtype, tuple(param.shape)) for name, param in model.named_parameters()}
    folder = Path(sys.argv[1]) / f"{size}"
    folder.mkdir()
    TensorFile.create(folder / "model.safetensors", specs, {}).close()  # a hole: all zeros, and no disk
    return model, outsize.prepare(model, {"x": torch.ones(1, size, dtype=torch.bfloat16)}, device="cpu", weights=folder, **how)

prepared(8, 3, torch.bfloat16)[1].detach()  # imports and caches are not the model's
before = peak()
model, engine = prepared(4096, 16, getattr(torch, sys.argv[2]), gpu_memory="150MiB", chunk_bytes="32MiB")
place = engine.runtime.place
homes = sum(place.host.values()) + sum(place.gpu.values())
weights = sum(p.nbytes for p in model.parameters())
largest = max(p.numel() for p in model.parameters()) * getattr(torch, sys.argv[2]).itemsize
print(json.dumps({"growth": peak() - before, "weights": weights, "homes": homes, "largest": largest, "streamed": len(place.slots.slot_of)}))
"""


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.full)])
def test_a_streamed_model_of_half_a_gibibyte_is_never_held_twice(tmp_path: Path, dtype: str) -> None:
    """`float32`: the files are converted on their way, one tensor at a time."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), dtype], capture_output=True, text=True, timeout=600, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    facts = json.loads(run.stdout.splitlines()[-1])
    assert facts["weights"] >= 2**29 and facts["streamed"] >= 12
    bound = facts["homes"] + 2 * facts["largest"]
    assert facts["growth"] <= bound, facts
    assert facts["growth"] + facts["weights"] > bound, "a second copy would pass unseen"
