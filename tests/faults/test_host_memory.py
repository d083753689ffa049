"""Host memory: a model handed over on the CPU is never held twice. Measured in a process of its own, by its peak
resident size.
"""

import gc
import json
import subprocess
import sys
import weakref

import cells
import pytest
import zoo

import outsize

SCRIPT = r"""
import json, sys
sys.path.insert(0, "src")
import torch
from torch import nn
import outsize

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.utils.skip_init(nn.Linear, 4096, 4096, bias=False, dtype=torch.bfloat16)
        self.linear.weight.data.fill_(2**-8)  # random numbers take longer than all the rest
    def forward(self, x):
        return x + torch.tanh(self.linear(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(36))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.float().square().mean()}

def peak():
    # Of this program alone: ru_maxrss begins with what the process held that started it.
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

class Warm(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.sum()}

batch = {"x": torch.ones(1, 4096, dtype=torch.bfloat16)}
outsize.prepare(Warm(), {"x": torch.ones(1, 8)}, device="cpu").detach()  # imports and caches are not the model's
before = peak()
model = Net()
model.layers[:28].requires_grad_(False)  # moments are six times the weights they belong to, and nothing is asked about them
weights = sum(p.nbytes for p in model.parameters())
engine = outsize.prepare(model, batch, device="cpu", gpu_memory="400MiB", chunk_bytes="32MiB")
place = engine.runtime.place
chunk = max(c.nbytes for c in engine.layout.chunks)
homes = sum(place.host.values()) + sum(place.gpu.values())
print(json.dumps({"growth": peak() - before, "weights": weights, "homes": homes, "chunk": chunk, "streamed": len(place.slots.slot_of)}))
"""


def test_preparing_a_model_of_a_gibibyte_never_holds_it_twice() -> None:
    """Design 3.7, trap F6: each parameter's old storage is freed as it moves."""
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    facts = json.loads(run.stdout.splitlines()[-1])
    assert facts["weights"] >= 2**30 and facts["streamed"] >= 30
    bound = facts["weights"] + (facts["homes"] - facts["weights"]) + facts["chunk"]
    assert facts["growth"] <= bound, facts
    assert facts["growth"] + facts["weights"] > bound, "a second copy would pass unseen"


@pytest.mark.full  # Python compiles torch and transformers anew
def test_the_engine_trains_under_python_O() -> None:
    """Trap A7: no invariant hangs on an assert statement that -O removes."""
    script = (
        "import sys; sys.path[:0] = ['src', 'tests']\nimport torch; torch.set_num_threads(1)\nimport zoo, cells, "
        "outsize\n"
        "spec = outsize.AdamW(lr=1e-2, max_grad_norm=0.5)\ndata = cells.batches('llama', 3)\n"
        "plain = cells.plain(zoo.make('llama'), data, spec=spec, steps=3)\nmodel = zoo.make('llama')\n"
        "engine = cells.prepare_by_hand(model, data[0], spec=spec, weights='host', optimizer='host', strategy='swap', "
        "device='sim:64MiB')\n"
        "found = cells.train(model, engine.optimizer, data, steps=3, accumulate=1, engine=engine)\n"
        "print(found.losses == plain.losses and found.norms == plain.norms)\n"
        "far = model.model.layers[3].mlp.up_proj.weight\nmodel.model.layers[0].register_forward_hook(lambda *_: "
        "far.sum())\n"
        "try:\n    model(**data[0])\nexcept outsize.base.errors.StaleParameter:\n    print('guarded')\n"
    )
    run = subprocess.run([sys.executable, "-O", "-c", script], capture_output=True, text=True, timeout=600, check=False)
    assert run.stdout.split()[-2:] == ["True", "guarded"], run.stderr[-2000:]


@pytest.mark.usefixtures("_profiles_anew")
def test_detached_engines_leave_nothing_behind() -> None:
    """Trap H7: neither the tracer, nor hooks, nor finalizers hold the model, the engine or its buffers."""
    for device in ("cpu", "sim:64MiB"):
        model = zoo.make("llama")
        engine = cells.prepare_by_hand(
            model,
            zoo.batch("llama"),
            spec=outsize.AdamW(),
            device=device,
            weights="host",
            optimizer="host",
            strategy="swap",
        )
        out = model(**zoo.batch("llama"))
        out.loss.backward()
        engine.optimizer.step()
        del out
        store = weakref.ref(engine.runtime.store)
        engine.detach()
        assert store() is None, "buffers must go with detach, not with the garbage collector"
        left = [weakref.ref(model), weakref.ref(engine)]
        del model, engine
        gc.collect()
        assert [ref() for ref in left] == [None, None]
