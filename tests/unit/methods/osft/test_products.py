"""The algebra of the drift in fp64, and what its bf16 products lose."""

import pytest
import torch
from torch import Tensor

from outsize import reference
from outsize.methods.osft import shape as shape_module
from outsize.methods.osft.bases import Bases, split
from outsize.methods.osft.products import contract, merge, spread

SIZES = [(16, 40), (24, 24), (40, 16)]
CASES = [(n, m, k) for n, m in SIZES for k in (0, 1, 5, min(n, m) - 1, min(n, m))]


def gradient_of(bases: Bases, dense: Tensor, **options) -> Tensor:
    dtype = torch.float64 if dense.dtype == torch.float64 else torch.float32
    out = torch.full(bases.shape.drift, torch.nan, dtype=dtype)
    contract(dense, bases, out=out, **options)
    return out


def random(*size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def frozen_spans(bases: Bases) -> tuple[Tensor, Tensor]:
    """Projectors on the frozen directions, left and right, in fp64."""
    free, frozen = bases.free.double(), bases.frozen.double()
    if bases.free_lo is not None and bases.frozen_lo is not None:
        free, frozen = free + bases.free_lo.double(), frozen + bases.frozen_lo.double()
    complement = torch.linalg.qr(free, mode="complete")[0][:, bases.shape.rank :]
    span = torch.linalg.qr(frozen.T)[0]
    small, large = complement @ complement.T, span @ span.T
    return (large, small) if bases.shape.is_mirrored else (small, large)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> bool:
    return found.shape == expected.shape and float((found - expected).norm()) <= tolerance * (
        1 + float(expected.norm())
    )


@pytest.mark.parametrize(("n", "m", "k"), CASES)
@pytest.mark.parametrize("decomposition", ["eigh", "svd"])
def test_bases_are_orthonormal_and_belong_to_the_largest_singular_values(n, m, k, decomposition) -> None:
    weight = random(n, m)
    bases = split(weight, k, decomposition=decomposition, is_transposed=n == m and k == 1)
    eye = torch.eye(min(n, m), dtype=torch.float64)
    assert close(bases.free.T @ bases.free, eye[k:, k:]) and close(bases.frozen @ bases.frozen.T, eye[:k, :k])
    u, _, v = torch.linalg.svd(weight)
    left, right = frozen_spans(bases)
    assert close(left, u[:, :k] @ u[:, :k].T, 1e-9) and close(right, v[:k].T @ v[:k], 1e-9)
    # W0 is the frozen part plus the free part, whatever the accuracy of the singular vectors.
    outer = torch.eye(n).double() - left, torch.eye(m).double() - right
    assert close(left @ weight @ right + outer[0] @ weight @ outer[1], weight, 1e-9)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(("n", "m", "k"), CASES)
def test_the_gradient_equals_autograd_and_finite_differences(n, m, k, is_transposed) -> None:
    weight, x, y = random(n, m), random(9, m, seed=1), random(9, n, seed=2)
    bases = split(weight, k, is_transposed=is_transposed)
    left, right = frozen_spans(bases)
    free = bases.free
    eye_n, eye_m = torch.eye(n).double(), torch.eye(m).double()

    def loss_of(drift: Tensor) -> Tensor:
        delta = (eye_n - left) @ drift @ free.T if bases.shape.is_mirrored else free @ drift @ (eye_m - right)
        return ((x @ (weight + delta).T - y) ** 2).sum()

    drift = random(*bases.shape.drift, seed=3).mul(0.1).requires_grad_()
    (expected,) = torch.autograd.grad(loss_of(drift), drift)
    drift = drift.detach()
    dense = 2 * (x @ (weight + spread(drift, bases)).T - y).T @ x
    gradient = gradient_of(bases, dense)
    assert close(gradient, expected)

    if drift.numel():  # central differences are exact for a quadratic loss
        direction = random(*drift.shape, seed=4)
        difference = (loss_of(drift + direction) - loss_of(drift - direction)) / 2
        assert float(difference) == pytest.approx(float((gradient * direction).sum()), rel=1e-11, abs=1e-9)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(("n", "m", "k"), CASES)
def test_the_reachable_set_is_that_of_four_projected_factors(n, m, k, is_transposed) -> None:
    """W = U_h S_h V_h + U diag(S) V with U ⟂ U_h and V ⟂ V_h."""
    weight, r = random(n, m), min(n, m) - k
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    bases = split(weight, k, is_transposed=is_transposed)
    high, low = (u[:, :k] * s[:k]) @ v[:k], (u[:, k:] * s[k:]) @ v[k:]
    left, right = frozen_spans(bases)
    # Every point of the factors is W0 + a drift's change.
    factor_u, factor_v = random(n, r, seed=1), random(r, m, seed=2)
    factor_u, factor_v = factor_u - left @ factor_u, factor_v - factor_v @ right
    change = (factor_u * random(r, seed=3)) @ factor_v - low
    assert close(spread(gradient_of(bases, change), bases), change)
    # Every drift's change is a point of the factors: of rank r at most, orthogonal to the frozen directions.
    change = spread(random(*bases.shape.drift, seed=4), bases)
    assert close(left @ change, torch.zeros_like(change)) and close(change @ right, torch.zeros_like(change))
    assert torch.linalg.matrix_rank(low + change, rtol=1e-9) <= r
    assert close(high + (low + change), weight + change)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("n", "m", "k"), [(16, 40, 5), (24, 24, 7), (40, 16, 15)])
def test_a_transposed_weight_has_the_transposed_drift(n, m, k, transposed) -> None:
    weight, dense = random(n, m), random(n, m, seed=1)
    bases, other = split(weight, k, is_transposed=transposed), split(weight.T, k, is_transposed=not transposed)
    assert bases.shape.drift == other.shape.drift[::-1]
    drift, other_drift = gradient_of(bases, dense), gradient_of(other, dense.T)
    assert close(spread(drift, bases), spread(other_drift, other).T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "m", "k"), [(150, 600, 70), (300, 300, 130), (600, 150, 70), (150, 600, 0)])
def test_blocks_and_workspace(n, m, k, dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks or whole, from a workspace of the counted bytes or from new memory: the same numbers."""
    weight, dense = random(n, m, dtype=dtype), random(n, m, seed=1, dtype=dtype)
    bases = split(weight, k)
    shape, wide = bases.shape, torch.float64 if dtype == torch.float64 else torch.float32
    drift, sum_before = random(*shape.drift, seed=2, dtype=wide), random(*shape.drift, seed=3, dtype=wide)
    tolerance = {torch.bfloat16: 1e-4, torch.float32: 1e-5, torch.float64: 1e-13}[dtype]
    results = []
    for blocks in (2**23, 1):
        monkeypatch.setattr(shape_module, "_BLOCK_NUMEL", blocks)
        # Uninitialized memory may hold NaN.
        counts = [shape.contract_scratch_bytes(dtype.itemsize, accumulate=a) for a in (False, True)]
        counts.append(shape.merge_scratch_bytes(dtype.itemsize))
        workspaces = [torch.full((count,), 255, dtype=torch.uint8) for count in counts]
        gradient, total, merged = gradient_of(bases, dense, scratch=workspaces[0]), sum_before.clone(), weight.clone()
        contract(dense, bases, out=total, accumulate=True, scratch=workspaces[1])
        assert torch.equal(total, sum_before + gradient)
        merge(weight, drift, bases, out=merged, scratch=workspaces[2])
        again = torch.empty_like(merged)
        merge(weight, drift, bases, out=again)
        assert torch.equal(gradient, gradient_of(bases, dense)) and torch.equal(merged, again)
        master = torch.empty(n, m, dtype=wide)
        merge(weight, drift, bases, out=master)
        assert torch.equal(master.to(dtype), merged) and close(master, weight + spread(drift, bases), 1e-6)
        with pytest.raises(AssertionError, match="are needed"):
            merge(weight, drift, bases, out=merged, scratch=workspaces[2][1:])
        results.append((gradient, master))
    assert all(close(a, b, tolerance) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(("n", "m"), [(64, 160), (96, 96), (160, 64)])
def test_precision_of_bf16_weights(n, m) -> None:
    """Against fp64: contract is as accurate as bf16, merge nearly as fp32."""
    weight, dense = random(n, m, dtype=torch.bfloat16), random(n, m, seed=1, dtype=torch.bfloat16)
    bases = split(weight, 32)
    left, right = frozen_spans(bases)
    free = bases.free.double() + bases.free_lo.double()
    keep = (torch.eye(n) - left, free.T) if bases.shape.is_mirrored else (free, torch.eye(m) - right)
    gradient = gradient_of(bases, dense)
    assert gradient.dtype == torch.float32 and close(gradient.double(), keep[0].T @ dense.double() @ keep[1].T, 1e-2)
    drift = random(*bases.shape.drift, seed=2, dtype=torch.float32)
    assert close(spread(drift, bases).double(), keep[0] @ drift.double() @ keep[1], 2e-5)


def test_a_drift_of_zeros_is_the_checkpoint() -> None:
    weight = random(64, 160, dtype=torch.bfloat16)
    bases, out = split(weight, 32), torch.empty(64, 160, dtype=torch.bfloat16)
    merge(weight, torch.zeros(bases.shape.drift), bases, out=out)
    assert torch.equal(out, weight)


@pytest.mark.parametrize("decomposition", ["eigh", "svd"])
def test_bases_ignore_autocast(decomposition) -> None:
    weight = random(96, 160, dtype=torch.float32)
    expected = split(weight, 40, decomposition=decomposition)
    with torch.autocast("cpu", torch.bfloat16):
        found = split(weight, 40, decomposition=decomposition)
    assert torch.equal(found.free, expected.free) and torch.equal(found.frozen, expected.frozen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_ignore_autocast(dtype: torch.dtype) -> None:
    """A backward or a step may run inside of it."""
    base, dense = random(96, 160, dtype=dtype), random(96, 160, seed=1, dtype=dtype)
    bases, merged = split(base, 40), [torch.empty_like(base) for _ in range(2)]
    expected = gradient_of(bases, dense)
    merge(base, expected, bases, out=merged[0])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(gradient_of(bases, dense), expected)
        merge(base, expected, bases, out=merged[1])
    assert torch.equal(*merged)


def test_fp32_products_ignore_tf32_and_leave_the_setting(request: pytest.FixtureRequest) -> None:
    matmul = torch.backends.mkldnn.matmul
    request.addfinalizer(lambda before=matmul.fp32_precision: setattr(matmul, "fp32_precision", before))
    matmul.fp32_precision = "bf16"
    weight = random(160, 96, dtype=torch.float32)
    bases = split(weight, 40)
    change = spread(random(*bases.shape.drift, seed=1, dtype=torch.float32), bases)
    left, right = frozen_spans(bases)
    assert float((left @ change.double()).norm() / change.norm()) < 2e-6
    assert float((change.double() @ right).norm() / change.norm()) < 2e-6
    assert matmul.fp32_precision == "bf16"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("n", "m", "k"),
    [
        (64, 160, 32),
        *(pytest.param(*shape, marks=pytest.mark.full) for shape in ((64, 160, 63), (96, 96, 80), (160, 64, 1))),
    ],
)
def test_200_steps_of_adamw_leave_the_frozen_directions(n, m, k, dtype) -> None:
    """D28: with clipping, weight decay and bf16 gradients, no part of the master's change leaks."""
    base = (random(n, m) * torch.linspace(3, 0.1, m) / m**0.5).to(dtype)
    target = random(n, m, seed=1, dtype=dtype) / m**0.5
    bases, weight = split(base, k), torch.nn.Parameter(base.clone())
    drift = torch.nn.Parameter(torch.zeros(bases.shape.drift))
    optimizer = reference.AdamW([drift], lr=1e-3, weight_decay=0.1, max_grad_norm=0.5)
    losses = []
    for step in range(200):
        x = random(32, m, seed=step, dtype=dtype)
        loss = ((x @ weight.T - x @ target.T) ** 2).mean() * 10
        (dense,) = torch.autograd.grad(loss, weight)
        losses.append(loss.item())
        drift.grad = gradient_of(bases, dense)
        optimizer.step()
        merge(base, drift.detach(), bases, out=weight.data)
    master = torch.empty(n, m, dtype=torch.float64)
    merge(base.double(), drift.detach(), bases, out=master)
    left, right = frozen_spans(split(base.float(), k))  # before they are halved
    change = master - base.double()
    assert losses[-1] < losses[0] and float(change.norm() / base.double().norm()) > 1e-2
    assert float((left @ change).norm() / change.norm()) < 1e-5
    assert float((change @ right).norm() / change.norm()) < 1e-5


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15, 1e30])
@pytest.mark.parametrize("decomposition", ["eigh", "svd"])
def test_bases_of_very_small_and_very_large_weights(decomposition, scale) -> None:
    """Squares of such values vanish or overflow in fp32."""
    weight = random(24, 40) * torch.linspace(3, 0.1, 40)
    expected = frozen_spans(split(weight, 5))
    found = frozen_spans(split((weight * scale).float(), 5, decomposition=decomposition))
    assert all(close(a, b, 1e-5) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "m"), [(24, 40), (24, 24), (40, 24)])
@pytest.mark.parametrize("rank", [0, 1, 4])
def test_weights_of_low_rank(n, m, rank, dtype) -> None:
    """With fewer singular values than frozen directions, those left are any that complete the bases."""
    weight = (random(n, rank) @ random(rank, m, seed=1)).to(dtype)
    for decomposition in ("eigh", "svd"):
        bases = split(weight, 10, decomposition=decomposition)
        left, right = frozen_spans(bases)
        whole = bases.free if bases.free_lo is None else bases.free.double() + bases.free_lo.double()
        assert close(whole.double().T @ whole.double(), torch.eye(bases.shape.rank).double(), 1e-4)
        assert close(left @ weight.double() @ right, weight.double(), 1e-2 if dtype == torch.bfloat16 else 1e-5)
        change = spread(random(*bases.shape.drift, seed=2, dtype=torch.float32), bases).double()
        assert float((left @ change).norm() / change.norm()) < 1e-5
        assert float((change @ right).norm() / change.norm()) < 1e-5
        merged = torch.empty_like(weight)
        merge(weight, torch.zeros(bases.shape.drift), bases, out=merged)
        assert torch.equal(merged, weight)


def test_contracting_micro_batches_equals_contracting_their_sum() -> None:
    """D33: to 1e-12 in fp64."""
    for n, m in SIZES:
        bases = split(random(n, m), 5)
        gradients = [random(n, m, seed=seed) for seed in range(1, 5)]
        total = torch.zeros(bases.shape.drift, dtype=torch.float64)
        for dense in gradients:
            contract(dense, bases, out=total, accumulate=True)
        assert close(total, gradient_of(bases, torch.stack(gradients).sum(0)))
