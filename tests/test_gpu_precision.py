"""Gram matrices with tf32 and bf16 products: the stated error, near pairs, edges, the request."""

import math

import numpy as np
import pytest
import torch

import normalign
from normalign import _gpu, _load, _rfam_cuda, reference
from normalign.testing import emulated_gpu, gpu_devices, on_gpu

EPS = {"tf32": 2.0**-11, "bf16": 2.0**-8}
NEAR = {"tf32": 1 / 16, "bf16": 1 / 4}
PRECISIONS = tuple(EPS)


@pytest.fixture(params=gpu_devices())
def device(request):
    with on_gpu(request.param) as device:
        if not _gpu.tensor_cores(device):
            pytest.skip("this GPU, or the build for it, has no tf32 and bf16")
        yield device


def bound(precision, u, z, length, exponent):
    """The docstring's bound for each pair, and float32's own rounding."""
    eps, near, width = EPS[precision], NEAR[precision], u.shape[1]
    size = (u.double().norm(dim=1)[:, None] + z.double().norm(dim=1)) / length
    points = torch.full_like(size, exponent / math.e * eps * math.sqrt(2 / near))
    if exponent >= 1:
        points = torch.minimum(points, eps * size)
    sums = exponent * (1.5 * width + 18 + width / 64) * 2.0**-23 / (2 * math.e * near)
    # To first order: 1.1% is the second in bf16. 4e-7: root and exponential.
    return 1.02 * points + sums + 4e-7


def gram(u, z, length, exponent, precision):
    return _rfam_cuda.gram(u, z, length, exponent, precision=precision)


def error(u, z, length, exponent, precision):
    got = gram(u, z, length, exponent, precision)
    exact = reference.laplace_gram(u.double(), z.double(), None, length, exponent)
    return (got.double() - exact).abs()


def badly_rounded(shape, device):
    """Points between the numbers of bf16 and of tf32: every rounding errs by its most, one way."""
    u = torch.where(torch.rand(shape, device=device) < 0.5, 1.0, -1.0)
    return u * (1 + 2.0**-11) * (1 + 2.0**-8)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("exponent", [1.0, 2.0, 0.7])
def test_within_the_stated_bound(device, precision, exponent):
    for m, n, width, length in ((3, 70, 33, 0.5), (65, 130, 64, 8.0), (129, 5, 100, 20.0)):
        u = torch.randn(m, width, device=device)
        z = torch.randn(n, width, device=device)
        for k in range(min(m, n)):  # pairs of every distance around the threshold, the worst ones
            z[k] = u[k] * (1 - 1.5 * (k + 1) / min(m, n))
        for a, b in ((u, z), (u, u), (badly_rounded((m, width), device), z)):
            found = error(a, b, length, exponent, precision)
            assert (found <= bound(precision, a, b, length, exponent)).all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_bound_is_reached(device, precision):
    """Opposite points that all move outwards: D = |u| + |v| grows by eps, almost."""
    u = badly_rounded((20, 40), device)
    found = error(u, -u, 100.0, 1.0, precision).diagonal()
    assert (found <= bound(precision, u, -u, 100.0, 1.0).diagonal()).all()
    # K falls by exp(-D / L) = 0.88 for each L, and bf16's rounding is 0.88 of its most.
    assert (found >= 0.7 * EPS[precision] * 2 * u.double().norm(dim=1) / 100.0).all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_wide_points(device, precision):
    u = torch.randn(40, 500, device=device)
    u[20:] = 0.5 * u[:20]
    found = error(u, u, 30.0, 1.0, precision)
    assert (found <= bound(precision, u, u, 30.0, 1.0)).all()


def test_the_request_changes_the_arithmetic(device):
    """By more than float32 errs, and less than the bound; each precision its own."""
    u, z = torch.randn(70, 64, device=device), torch.randn(90, 64, device=device)
    plain = error(u, z, 8.0, 1.0, None).max().item()
    tf32, bf16 = (error(u, z, 8.0, 1.0, p).max().item() for p in PRECISIONS)
    assert plain < 1e-6
    assert 10 * plain < tf32 < 1e-4
    assert 4 * tf32 < bf16 < 1e-3


def test_rounded_points_have_their_own_matrix(device):
    """What rounding alone does: the matrix of the points in tf32 or bf16, to float32's error."""
    u = torch.randn(70, 64, device=device).bfloat16().float()
    for precision in PRECISIONS:
        assert error(u, u, 8.0, 1.0, precision).max().item() < 2e-6


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("n", [1, 31, 64, 65, 128, 129, 200])
def test_symmetric_with_ones_on_the_diagonal(device, precision, n):
    u = torch.randn(n, 40, device=device)
    k = gram(u, u, 2.0, 1.0, precision)
    assert torch.equal(k, k.T)
    assert torch.equal(k.diagonal(), torch.ones(n, device=device))
    assert torch.equal(k, gram(u, u.clone(), 2.0, 1.0, precision))
    assert torch.equal(k[3:9], gram(u[3:9], u, 2.0, 1.0, precision))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("near", [5, 140])
def test_near_pairs_lose_no_digits(device, precision, near):
    """A few pairs are computed again one by one, a cluster's by whole quarters of the tile."""
    u = torch.randn(140, 40, device=device)
    u[:near] = u[0] + 1e-3 * torch.randn(near, 40, device=device)
    assert error(u, u, 1.0, 1.0, precision)[:near, :near].max().item() <= 4e-7


@pytest.mark.parametrize("precision", PRECISIONS)
def test_copies_have_equal_rows(device, precision):
    u = torch.randn(40, 35, device=device).repeat(5, 1)
    k = gram(u, u, 3.0, 1.0, precision)
    assert torch.equal(k, k[:40, :40].repeat(5, 5))
    assert torch.equal(k[::40], torch.stack([k[0]] * 5))
    assert (error(u, u, 3.0, 1.0, precision) <= bound(precision, u, u, 3.0, 1.0)).all()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("width", [33, 39, 40, 41, 47, 48, 49, 63, 65])
def test_edges_of_steps_and_tiles(device, precision, width):
    """Widths around whole steps of 8 and 16; rows and columns around tiles; odd addresses."""
    for m, n in ((1, 1), (15, 17), (64, 65), (127, 129)):
        buffer = torch.full(((m + n) * width + 1,), float("nan"), device=device)
        buffer[1:] = torch.randn((m + n) * width)
        u, z = buffer[1 : 1 + m * width].view(m, width), buffer[1 + m * width :].view(n, width)
        found = error(u, z, 8.0, 1.0, precision)
        assert (found <= bound(precision, u, z, 8.0, 1.0)).all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_batch_with_own_counts(device, precision):
    u = torch.randn(3, 140, 37, device=device)
    z = torch.randn(3, 70, 37, device=device)
    own_m, own_n = (
        torch.tensor(t, dtype=torch.int32, device=device) for t in ((140, 3, 65), (1, 70, 66))
    )
    u[1, 3:], z[0, 1:] = float("nan"), float("nan")  # beyond the counts: never looked at
    k = _rfam_cuda.gram(u, z, 5.0, 1.0, own_m=own_m, own_n=own_n, precision=precision)
    for p, (m, n) in enumerate(zip(own_m.tolist(), own_n.tolist(), strict=True)):
        one = gram(u[p, :m].contiguous(), z[p, :n].contiguous(), 5.0, 1.0, precision)
        assert torch.equal(k[p, :m, :n], one)
    k = _rfam_cuda.gram(u, u, 5.0, 1.0, own_m=own_m, own_n=own_m, precision=precision)
    one = gram(u[2, :65].contiguous(), u[2, :65].contiguous(), 5.0, 1.0, precision)
    assert torch.equal(k[2, :65, :65], one)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_is_not_finite_and_what_overflows(device, precision):
    u = torch.randn(20, 36, device=device)
    u[2, 3], u[4], u[7, 30] = float("inf"), 0.0, float("nan")
    u[9] = 3e19  # squares overflow
    u[10] = 3e19
    u[10, 0] = 3.1e19
    u[11, 5] = torch.finfo(torch.float32).max  # rounds to infinity in tf32 and bf16
    for length in (2.0, 1e19):
        got, plain = (gram(u, u, length, 1.0, p) for p in (precision, None))
        torch.testing.assert_close(got, plain, equal_nan=True, rtol=0, atol=0.02)
        exact = reference.laplace_gram(u.double(), u.double(), None, length)
        huge = slice(9, 11)
        torch.testing.assert_close(got[huge, huge].double(), exact[huge, huge])
        assert got[4, 4].item() == 1.0
    tiny = torch.full((3, 40), 1e-30, device=device)  # squares underflow
    assert torch.equal(gram(tiny, tiny, 1.0, 1.0, precision), torch.ones(3, 3, device=device))


def _public(device, dtype=torch.float32, d=40):
    x, z = (torch.randn(n, d, dtype=dtype, device=device) for n in (70, 30))
    root = torch.randn(d, d, dtype=dtype, device=device)
    return x, z, root @ root.T / d


@pytest.mark.parametrize("precision", PRECISIONS)
def test_public_function(device, precision):
    x, z, matrix = _public(device)
    exact = reference.laplace_gram(x.double(), z.double(), matrix.double(), 8.0)
    plain = normalign.laplace_gram(x, z, matrix, 8.0)
    got = normalign.laplace_gram(x, z, matrix, 8.0, precision=precision)
    assert not torch.equal(got, plain)
    assert (got - exact).abs().max().item() < 10 * EPS[precision] / 8
    # An offset of x and z changes nothing: points are centred before they are rounded.
    moved = normalign.laplace_gram(x + 256, z + 256, matrix, 8.0, precision=precision)
    assert (moved - exact).abs().max().item() < 10 * EPS[precision] / 8
    k = normalign.laplace_gram(x, x, matrix, 8.0, precision=precision)
    assert torch.equal(k.diagonal(), torch.ones_like(k.diagonal()))


def test_where_it_is_not_used(device):
    """A permission: float64, narrow points and points that need float64 are as without it."""
    for x, z, matrix, length in (
        (*_public(device, torch.float64), 8.0),
        (*_public(device, d=32), 8.0),
        (*_public(device), 0.05),
    ):
        plain = normalign.laplace_gram(x, z, matrix, length)
        assert torch.equal(normalign.laplace_gram(x, z, matrix, length, precision="tf32"), plain)
    x, z, matrix = _public(torch.device("cpu"))
    before, _gpu.emulating = _gpu.emulating, False
    try:
        plain = normalign.laplace_gram(x, z, matrix, 8.0)
        assert torch.equal(normalign.laplace_gram(x, z, matrix, 8.0, precision="bf16"), plain)
    finally:
        _gpu.emulating = before


def test_gradients_are_those_without(device):
    inputs = tuple(t.requires_grad_() for t in _public(device))
    grad = torch.randn(70, 30, device=device)
    plain, found = (
        torch.autograd.grad(normalign.laplace_gram(*inputs, 8.0, precision=precision), inputs, grad)
        for precision in (None, "bf16")
    )
    for a, b in zip(plain, found, strict=True):
        assert torch.equal(a, b)


def test_one_kernel_for_older_code(monkeypatch):
    """Code for sm_75 has no such products: what was built for it runs in float32."""
    for built, found, expected in (
        ("75", (9, 0), False),  # by its PTX
        ("75,80", (8, 6), True),
        ("75,80", (7, 5), False),
        ("80,90,100", (9, 0), True),
    ):
        module = type("Module", (), {"architectures": built})
        monkeypatch.setattr(_load, "_cuda", module)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index, f=found: f)
        _gpu._tensor_cores.cache_clear()
        assert _gpu.tensor_cores(torch.device("cuda:0")) is expected
    _gpu._tensor_cores.cache_clear()


@pytest.mark.parametrize("wrong", ["fp16", "TF32", "", 16, np.array(["tf32", "bf16"])])
def test_bad_precision(wrong):
    x = torch.randn(3, 40)
    with pytest.raises(ValueError, match=r"precision must be None, 'tf32' or 'bf16', got "):
        normalign.laplace_gram(x, x, None, 1.0, precision=wrong)


@pytest.mark.skipif("emulated" not in gpu_devices(), reason="not built")
def test_opcheck_and_compile():
    x, z, matrix = _public(torch.device("cpu"))
    with emulated_gpu():
        op = torch.ops.normalign.laplace_gram.default
        torch.library.opcheck(op, (x[:5].requires_grad_(), z[:4], matrix, 8.0, 1.0, "tf32"))
        compiled = torch.compile(normalign.laplace_gram, fullgraph=True, backend="aot_eager")
        x = x.detach()
        for bandwidth in (8.0, 3.0):  # the second becomes a symbol
            arguments = (x, z, matrix, bandwidth)
            got = compiled(*arguments, precision="tf32")
            assert torch.equal(got, normalign.laplace_gram(*arguments, precision="tf32"))
