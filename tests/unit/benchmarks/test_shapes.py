"""The shapes are the real models': their number of parameters is the published one, and the peers' harness has the
same.
"""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.bench_record import Bench
from benchmarks.measure import complete
from benchmarks.shapes import SHAPES, named_config, random_batches, random_shape
from outsize.base.errors import ConfigError
from outsize.run.random_weights import RandomWeights
from outsize.run.shapes import require_one_of

PUBLISHED = {
    "llama-1b": 1_235_814_400,
    "llama-3b": 3_212_749_824,
    "llama-7b": 6_738_415_616,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen2.5-vl-3b": 3_754_622_976,
    "qwen2.5-vl-7b": 8_292_166_656,
}
ROOT = Path(__file__).parents[3]
PEERS = [
    path
    for path in (ROOT.parent / "shared" / "bench" / "peers.py", ROOT / "carry" / "bench" / "peers.py")
    if path.exists()
]


@pytest.fixture(scope="module")
def weights() -> RandomWeights:
    return RandomWeights()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_has_as_many_parameters_as_its_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outsize.run.random_weights.RandomWeights", lambda: None)
    model, _ = random_shape(name, seq=16)
    assert sum(param.numel() for param in model.parameters()) == PUBLISHED[name]
    assert all(buffer.device.type == "cpu" for buffer in model.buffers())
    assert set(PUBLISHED) == set(SHAPES) - {"tiny"}


@pytest.mark.skipif(not PEERS, reason="the peers' harness is not in this checkout")
@pytest.mark.parametrize("name", ["llama-1b", "llama-3b", "llama-7b", "llama-8b"])
def test_a_shape_is_what_the_peers_train(name: str) -> None:
    (made,) = (
        n.value
        for n in ast.parse(PEERS[0].read_text()).body
        if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "MODELS"
    )
    theirs = eval(compile(ast.Expression(made), "peers", "eval"))[name.replace("-", "")]
    config = named_config(name)
    assert {key: getattr(config, key) for key in theirs} == theirs


def test_a_longer_row_has_its_positions() -> None:
    assert named_config("tiny", seq=5000).max_position_embeddings == 5000
    assert named_config("llama-8b", seq=5000).max_position_embeddings == 131072


def test_rotary_tables_are_those_of_a_model_built_the_usual_way() -> None:
    from transformers import AutoModelForCausalLM

    config = named_config("llama-1b", seq=16)
    config.num_hidden_layers, config.vocab_size, config.intermediate_size = 1, 8, 8
    usual = AutoModelForCausalLM.from_config(config)
    model, _ = random_shape("llama-1b", seq=16)
    tables = dict(usual.named_buffers())
    assert tables and all(torch.equal(buffer, tables[name]) for name, buffer in model.named_buffers())


def test_random_weights_depend_on_the_name_alone(weights: RandomWeights) -> None:
    a, b, other = (torch.empty(64, 32, dtype=torch.bfloat16) for _ in range(3))
    weights.read_into("x.weight", a)
    weights.read_into("y.weight", other)
    RandomWeights().read_into("x.weight", b)
    assert torch.equal(a, b) and not torch.equal(a, other)
    assert 0.015 < float(a.float().std()) < 0.025 and abs(float(a.float().mean())) < 0.002


def test_norms_are_one_and_biases_zero(weights: RandomWeights) -> None:
    norm, bias = torch.empty(32, dtype=torch.bfloat16), torch.empty(32, dtype=torch.bfloat16)
    weights.read_into("layers.0.input_layernorm.weight", norm)
    weights.read_into("layers.0.q_proj.bias", bias)
    assert bool((norm == 1).all()) and bool((bias == 0).all())


def test_a_matrix_larger_than_the_buffer_has_no_equal_rows(weights: RandomWeights) -> None:
    large = torch.empty(2**24 // 1024 + 8, 1024, dtype=torch.bfloat16)
    weights.read_into("embed.weight", large)
    assert bool(large.isfinite().all()) and not any(
        torch.equal(large[0], large[i]) for i in (2**14 - 1, 2**14, 2**14 + 1)
    )


def asked(**given: Any) -> Bench:
    return complete(**dict(model="tiny", device="cpu", micro_batch=2, seq=8) | given)


def test_images_have_their_tokens_and_text_has_none_of_them() -> None:
    model, _ = random_shape("qwen2.5-vl-3b", seq=64)
    config: Any = model.config
    first, other = random_batches(model, asked(seq=64, images=2, image_size=112), number=2)
    marked = first["input_ids"] == config.image_token_id
    assert first["image_grid_thw"].tolist() == [[1, 8, 8]] * 4 and int(marked.sum()) == 2 * 2 * 16
    assert first["pixel_values"].shape == (4 * 64, 3 * 2 * 14**2) and not torch.equal(
        first["pixel_values"], other["pixel_values"]
    )
    around = (
        marked
        | (first["input_ids"] == config.vision_start_token_id)
        | (first["input_ids"] == config.vision_end_token_id)
    )
    assert torch.equal(first["labels"] == -100, around)
    assert int(first["input_ids"][~around].max()) < config.vision_start_token_id


def test_batches_are_the_same_every_time() -> None:
    model, _ = random_shape("tiny", seq=8)
    first, again = random_batches(model, asked()), random_batches(model, asked())
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0]["input_ids"], first[1]["input_ids"]) and first[0]["input_ids"].shape == (2, 8)


@pytest.mark.parametrize(
    ("given", "nearest"),
    [("llama3b", "llama-3b"), ("Qwen3_14B", "qwen3-14b"), ("tny", "tiny"), ("llama-80b", "llama-8b")],
)
def test_a_wrong_name_gets_the_nearest_as_a_hint(given: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"--model {given!r} is unknown. Did you mean {nearest}[?]"):
        require_one_of(SHAPES, given, "--model")


def test_a_name_like_none_gets_all_names_as_a_hint() -> None:
    with pytest.raises(ConfigError, match=r"'gpt' is unknown\. Choose one of tiny, llama-1b"):
        named_config("gpt")
