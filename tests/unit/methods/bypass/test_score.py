"""Scores of all candidates in one pass: the bits of one whole model per replacement."""

import copy
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict

import cells
import pytest
import torch
import zoo
from torch import nn
from torch.nn.functional import cross_entropy, kl_div

from outsize.methods.bypass import score as score_module
from outsize.methods.bypass.score import Candidate, replaced, score
from outsize.model.stack import LayerStack

FFN = {"llama": "mlp", "qwen3": "mlp", "gemma2": "mlp", "gpt2": "mlp", "mixtral": "mlp"}


class Scaled(nn.Module):
    """A stand-in for a pruned sub-block."""

    def __init__(self, inner: nn.Module, factor: float):
        super().__init__()
        self.inner, self.factor = copy.deepcopy(inner), factor

    def forward(self, hidden):
        output = self.inner(hidden)
        return output * self.factor if isinstance(output, torch.Tensor) else (output[0] * self.factor, *output[1:])


def scores_of(kind, host_bytes=None):
    model = zoo.make(kind, torch.float32).eval()
    batches = cells.batches(kind, 2)
    stack = LayerStack(model)
    read = Counter()

    def loaded(index):
        read[index] += 1
        return nullcontext()

    candidates = [
        Candidate(
            f"{index}.{factor}",
            {
                index: lambda layer=layer.module, factor=factor: replaced(
                    layer, {FFN[kind]: Scaled(layer.get_submodule(FFN[kind]), factor)}
                )
            },
        )
        for index, layer in enumerate(stack.layers)
        for factor in (0.0, 0.5, 1.0)
    ]
    done = []
    found = score(
        stack,
        [lambda batch=batch: batch for batch in batches],
        candidates,
        loaded=loaded,
        host_bytes=host_bytes,
        progress=lambda *counts: done.append(counts),
    )
    assert done[-1][0] == done[-1][1]
    return model, batches, stack, candidates, read, found


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gpt2"])
@torch.no_grad()
def test_equals_one_model_per_replacement(kind):
    model, batches, stack, candidates, read, (teacher, found) = scores_of(kind)
    assert set(read.values()) == {1} and len(read) == len(stack.layers)
    wanted = [model(**{k: v for k, v in batch.items() if k != "labels"}, use_cache=False).logits for batch in batches]
    assert teacher.kl == 0 and teacher.top1 == teacher.top10 == 1
    assert teacher.cosine == pytest.approx(1, abs=1e-6)
    for candidate in candidates:
        with candidate.layers[candidate.first]():
            logits = [
                model(**{k: v for k, v in batch.items() if k != "labels"}, use_cache=False).logits for batch in batches
            ]
        # The same bits: the sums are of the same numbers in the same order.
        same = sum(
            (b.log_softmax(-1).exp() * (b.log_softmax(-1) - a.log_softmax(-1))).sum(-1).double().sum().item()
            for a, b in zip(logits, wanted, strict=True)
        )
        tokens = sum(each.shape[:-1].numel() for each in wanted)
        scores = found[candidate.name]
        assert scores.kl == same / tokens
        independent = sum(
            kl_div(a.log_softmax(-1), b.log_softmax(-1), log_target=True, reduction="sum").item()
            for a, b in zip(logits, wanted, strict=True)
        )
        assert scores.kl == pytest.approx(independent / tokens, rel=1e-4, abs=1e-9)
        losses, count = 0.0, 0
        for batch, each in zip(batches, logits, strict=True):
            labels = batch["labels"][:, 1:]
            losses += cross_entropy(each[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum").item()
            count += int((labels != -100).sum())
        assert scores.loss == pytest.approx(losses / count, rel=1e-6)
        agree = sum((a.argmax(-1) == b.argmax(-1)).sum().item() for a, b in zip(logits, wanted, strict=True))
        assert scores.top1 == agree / tokens
        if candidate.name.endswith("1.0"):
            assert scores.kl == 0 and scores.loss == teacher.loss
        else:
            assert scores.kl > 0 and scores.cosine < 1
    assert all(each.module is model.get_submodule(each.name) for each in stack.layers)


def test_several_passes_give_the_same_bits():
    *_, candidates, read, one = scores_of("llama")
    rows = sum(batch["input_ids"].numel() for batch in cells.batches("llama", 2))
    hidden_bytes = rows * zoo.make("llama").config.hidden_size * 4
    *_, again, several = scores_of("llama", host_bytes=3 * hidden_bytes)
    assert one == several
    assert set(again.values()) == {len(candidates) // 2} and set(read.values()) == {1}


def test_tokens_are_compared_some_at_a_time(monkeypatch):
    *_, (teacher, found) = scores_of("llama")
    monkeypatch.setattr(score_module, "_MOST_ELEMENTS", 5 * zoo.VOCAB)
    *_, (same, parts) = scores_of("llama")
    assert asdict(same) == pytest.approx(asdict(teacher), rel=1e-6)
    for name, scores in found.items():
        assert asdict(parts[name]) == pytest.approx(asdict(scores), rel=1e-6, abs=1e-12)


def test_padding_does_not_count():
    model = zoo.make("llama", torch.float32).eval()
    stack = LayerStack(model)
    ids = torch.arange(24).view(2, 12)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    labels = ids.masked_fill(mask == 0, -100)

    def scored(filler):
        padded = ids.masked_fill(mask == 0, filler)
        batch = {"input_ids": padded, "attention_mask": mask, "labels": labels}
        layer = stack.layers[0].module
        one = Candidate("0", {0: lambda: replaced(layer, {"mlp": Scaled(layer.mlp, 0.5)})})
        return score(stack, [lambda: batch], [one], loaded=lambda _: nullcontext())

    assert scored(1) == scored(5)


@torch.no_grad()
def test_a_candidate_may_replace_many_layers():
    """An assembled model: it joins at its first replacement."""
    model = zoo.make("llama", torch.float32).eval()
    stack = LayerStack(model)
    (batch,) = cells.batches("llama", 1)
    halves = {layer: Scaled(stack.layers[layer].module.mlp, 0.5) for layer in (1, 3)}
    layers = {
        layer: lambda layer=layer: replaced(stack.layers[layer].module, {"mlp": halves[layer]}) for layer in halves
    }
    _, found = score(stack, [lambda: batch], [Candidate("both", layers)], loaded=lambda _: nullcontext())
    given = {name: value for name, value in batch.items() if name != "labels"}
    expected = model(**given).logits.log_softmax(-1)
    with layers[1](), layers[3]():
        logits = model(**given).logits.log_softmax(-1)
    wanted = (expected.exp() * (expected - logits)).sum(-1).double().sum().item() / batch["input_ids"].numel()
    assert found["both"].kl == pytest.approx(wanted, rel=1e-6) and wanted > 0
