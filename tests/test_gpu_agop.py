"""The AGOP on a GPU, emulated here and on the GPU where there is one, against NumPy."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from normalign import _load, _rfam_agop_cuda
from normalign._rfam_agop_cuda import agop
from normalign.testing import DTYPES, gpu_devices, on_gpu

LENGTH = 2.0


@pytest.fixture(params=gpu_devices())
def device(request):
    with on_gpu(request.param) as device:
        yield device


def _oracle(u, z, coef, exponent=1.0, weight=None):
    """The sums, and the size of what rounding can change in them, per unit of rounding.

    In extended precision, straight from the equation: a term ``W_ij a_jk (z_j - u_i)`` is off by
    so many roundings times ``1 + (D / L)^q``, the exponential's share; a product of two gradients
    by the error of either times the other.
    """
    u, z, coef = (t.detach().cpu().numpy().astype(np.longdouble) for t in (u, z, coef))
    w = np.ones(len(u)) if weight is None else weight.cpu().numpy().astype(np.longdouble)
    difference = z[None] - u[:, None]  # (m, n, r)
    t = np.sqrt((difference**2).sum(2)) / LENGTH
    power = t**exponent
    safe = np.where(t == 0, 1, t)
    W = np.where(t == 0, 0, exponent * power / (LENGTH * safe) ** 2 * np.exp(-power))
    terms = W[:, :, None, None] * coef[None, :, :, None] * difference[:, :, None]  # (m, n, c, r)
    g = terms.sum(1)
    size = (np.abs(terms) * (1 + power)[:, :, None, None]).sum(1)
    total = np.einsum("i,ikt,iks->ts", w, g, g)
    unit = np.einsum("i,ikt,iks->ts", w, np.abs(g), size)
    return total, unit + unit.T


def _check(got, u, z, coef, exponent=1.0, weight=None):
    """Roundings are random: eight of them, of all terms at once, are three times what is seen."""
    exact, unit = _oracle(u, z, coef, exponent, weight)
    assert got.dtype is torch.float64
    assert got.shape == exact.shape
    bound = 8 * torch.finfo(u.dtype).eps * unit
    wrong = np.abs(got.cpu().numpy() - exact)
    assert (wrong <= bound).all(), f"off by {float((wrong / bound).max()):.3g} times the bound"


def _points(n, width, dtype, device):
    return torch.randn(n, width, dtype=dtype, device=device)


def _launches(call, device):
    """The result, which took one launch of ours where the machine counts them."""
    before = _load._emu.launches() if device.type == "cpu" else 0
    result = call()
    if device.type == "cpu":
        assert _load._emu.launches() == before + 1
    return result


SIZES = (1, 63, 64, 65, 97)  # of m and n: every pair is taken by some width


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 2, 31, 32, 33, 63, 64])
def test_sizes(device, dtype, width):
    for turn, m in enumerate(SIZES):
        n = SIZES[(turn + width) % len(SIZES)]
        c = (1, 2, 7)[(turn + width) % 3]
        u, z = _points(m, width, dtype, device), _points(n, width, dtype, device)
        coef = _points(n, c, dtype, device)
        weight = None if turn % 2 else torch.rand(m, dtype=dtype, device=device)
        if weight is not None:
            weight[::3] = 0
        got = _launches(lambda a=(u, z, coef, LENGTH, 1.0, weight): agop(*a), device)
        _check(got, u, z, coef, weight=weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [2.0, 0.7])
def test_other_kernels_and_many_classes(device, dtype, exponent):
    """Three tiles of points z, and classes that take more than one group of blocks."""
    u, z = _points(11, 5, dtype, device), _points(300, 5, dtype, device)
    coef = _points(300, 70, dtype, device)
    _check(agop(u, z, coef, LENGTH, exponent), u, z, coef, exponent)


@pytest.mark.parametrize("dtype", DTYPES)
def test_own_points_and_copies(device, dtype):
    """At distance 0 there is no gradient, neither at the own point nor at copies of it."""
    u = _points(97, 6, dtype, device)
    u[50:60] = u[:10]
    coef = _points(97, 3, dtype, device)
    _check(agop(u, u, coef, LENGTH, 1.0), u, u, coef)
    same = u[:1].expand(70, 6)
    assert not agop(same, same, coef[:70], LENGTH, 1.0).any()


@pytest.mark.parametrize("width", [3, 40])
def test_far_and_near_points(device, width):
    """Differences are those of the own point: neither an offset nor a near neighbour cancels."""
    z = _points(70, width, torch.float32, device) + 1e4
    z[1::2] = z[::2] + 2e-3  # two units of float32 there
    coef = _points(70, 2, torch.float32, device)
    _check(agop(z, z, coef, LENGTH, 1.0), z, z, coef)
    near = z - 1e4
    near[1::2] = near[::2] + 1e-6 * torch.rand_like(near[::2])
    _check(agop(near, near, coef, LENGTH, 1.0), near, near, coef)


@pytest.mark.parametrize("size", [1e-30, 1e-15, 1e15, 1e30])
def test_tiny_and_huge_coefficients(device, size):
    """Squares leave the range of float32, not that of the float64 sums."""
    u, z = (_points(m, 4, torch.float32, device) for m in (20, 30))
    coef = _points(30, 3, torch.float32, device) * size
    _check(agop(u, z, coef, LENGTH, 1.0), u, z, coef)


def test_weights_count_rows(device):
    """Weights of any dtype; a row that counts three times is three rows."""
    u, z = (_points(m, 4, torch.float32, device) for m in (33, 20))
    coef = _points(20, 2, torch.float32, device)
    times = torch.tensor([0, 1, 3] * 11, device=device)
    got = agop(u, z, coef, LENGTH, 1.0, times.double())
    _check(got, u, z, coef, weight=times)
    rows = u.repeat_interleave(times, 0)
    # The root of a weight is rounded to float32.
    torch.testing.assert_close(got, agop(rows, z, coef, LENGTH, 1.0), rtol=1e-6, atol=1e-6)
    assert not agop(u, z, coef, LENGTH, 1.0, torch.zeros(33, device=device)).any()


OWN = ((30, 20), (0, 20), (1, 97), (64, 0), (65, 64), (17, 33))  # m and n of a batch


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [7, 64, 65])
def test_batches(device, dtype, width):
    """Problems of several sizes in one launch; what lies beyond their own points is not read."""
    m, n, c = 65, 97, 2
    u, z = (torch.full((len(OWN), k, width), float("nan"), dtype=dtype) for k in (m, n))
    coef = torch.full((len(OWN), n, c), float("nan"), dtype=dtype)
    weight = torch.full((len(OWN), m), float("nan"), dtype=dtype)
    for b, (own_m, own_n) in enumerate(OWN):
        u[b, :own_m], z[b, :own_n] = torch.randn(own_m, width), torch.randn(own_n, width)
        coef[b, :own_n], weight[b, :own_m] = torch.randn(own_n, c), torch.rand(own_m)
    u, z, coef, weight = (t.to(device) for t in (u, z, coef, weight))
    own_m, own_n = (
        torch.tensor(k, dtype=torch.int32, device=device) for k in zip(*OWN, strict=True)
    )
    if width > 64:  # there the weights of rows that do not exist are taken, times 0
        weight = weight.nan_to_num()
    got = _launches(lambda: agop(u, z, coef, LENGTH, 1.0, weight, own_m=own_m, own_n=own_n), device)
    for b, (i, j) in enumerate(OWN):
        _check(got[b], u[b, :i], z[b, :j], coef[b, :j], weight=weight[b, :i])


def _large_batch(device, dtype, c, count, width):
    """So many tiles of 32 rows that blocks take several, and some blocks one less."""
    m = 129
    u = _points(count * m, width, dtype, device).view(count, m, width)
    z, coef = u[:, :3].contiguous(), _points(count * 3, c, dtype, device).view(count, 3, c)
    own_m = torch.full((count,), m, dtype=torch.int32, device=device)
    own_m[1] = 40
    got = agop(u, z, coef, LENGTH, 1.0, own_m=own_m)
    for b in (0, 1, count - 1):
        _check(got[b], u[b, : own_m[b]], z[b], coef[b])


@pytest.mark.parametrize(("dtype", "c"), [(torch.float64, 2), (torch.float32, 1)])
def test_large_batches(device, dtype, c):
    _large_batch(device, dtype, c, 212, 3)


@pytest.mark.parametrize(("dtype", "c"), [(torch.float64, 1), (torch.float32, 2)])
def test_wide_large_batches(device, dtype, c):
    _large_batch(device, dtype, c, 212, 64)


def test_small_shared_memory(device):
    """32 rows of 64 numbers need 118 KiB; where there are 99, blocks have 8 rows."""
    if device.type != "cpu":
        pytest.skip("the host machine's shared memory can be made small")
    _load._emu.set_shared_limit(99 << 10)
    try:
        _large_batch(device, torch.float64, 2, 132, 64)
    finally:
        _load._emu.set_shared_limit(227 << 10)


def test_every_width_fits_into_99_kib(device):
    """What every GPU from sm_80 on has; most is asked for by many classes in float64."""
    if device.type != "cpu":
        pytest.skip("the host machine's shared memory can be made small")
    _load._emu.set_shared_limit(99 << 10)
    try:
        for width in range(1, 65):
            for dtype, c in ((torch.float64, 30), (torch.float64, 32), (torch.float32, 64)):
                u, coef = _points(2, width, dtype, device), _points(2, c, dtype, device)
                _check(agop(u, u, coef, LENGTH, 1.0), u, u, coef)
    finally:
        _load._emu.set_shared_limit(227 << 10)


@pytest.mark.parametrize("c", [65535, 65536])
def test_more_classes_than_a_launch_takes(device, c):
    u, coef = _points(2, 2, torch.float64, device), _points(2, c, torch.float64, device)
    exact = _oracle(u, u, coef)[0].astype(np.float64)
    # Of products, which are less accurate than the kernel.
    np.testing.assert_allclose(
        agop(u, u, coef, LENGTH, 1.0).cpu().numpy(), exact, rtol=0, atol=1e-11 * np.abs(exact).max()
    )


@pytest.mark.parametrize("size", [1e-160, 1e160])
def test_squares_beyond_float64(device, size):
    """A weight's root is in range where its square is not, or K is 0: never NaN."""
    u = size * _points(9, 3, torch.float64, device)
    got = agop(u, u, _points(9, 2, torch.float64, device), 50.0, 0.7)
    assert torch.isfinite(got).all()


def test_strides_and_offsets(device):
    """Neither contiguous nor aligned, and not changed."""
    base = _points(80, 23, torch.float32, device)
    kept = base.clone()
    u, z, coef = base[1::2, 1:12], base[:, 2:13], base.T[3:6].T
    weight = base[:, 0].square()[::2]
    got = agop(u, z, coef, LENGTH, 1.0, weight)
    _check(got, u, z, coef, weight=weight)
    shifted = torch.empty(41, device=device)[1:].view(8, 5).copy_(u[:8, :5])
    _check(agop(shifted, shifted, coef[:8], LENGTH, 1.0), shifted, shifted, coef[:8])
    assert torch.equal(base, kept)


def test_nan_is_neither_hidden_nor_spread(device):
    u = _points(3 * 40, 5, torch.float32, device).view(3, 40, 5)
    coef = _points(3 * 40, 2, torch.float32, device).view(3, 40, 2)
    u[1, 7, 2] = float("nan")
    got = agop(u, u, coef, LENGTH, 1.0)
    assert torch.isnan(got[1]).all()
    for b in (0, 2):
        _check(got[b], u[b], u[b], coef[b])
    assert torch.isnan(agop(u[1], u[0], coef[0], LENGTH, 1.0)).all()  # one row of many
    assert torch.isnan(agop(u[0], u[1], coef[0], LENGTH, 1.0)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("own_points", [True, False])
@pytest.mark.parametrize("width", [6, 65])
def test_products(device, dtype, own_points, width, monkeypatch):
    """Many features, or one large problem: all at once, and in groups of rows and of classes."""
    monkeypatch.setattr(_rfam_agop_cuda, "_FEW", 0)
    z = _points(90, width, dtype, device)
    u = z if own_points else _points(70, width, dtype, device)
    coef = _points(90, 3, dtype, device)
    weight = 0.5 + torch.rand(u.shape[0], dtype=dtype, device=device)
    exact = _oracle(u, z, coef, weight=weight)[0]
    # Two sums of 90 terms that cancel, squared and summed over points: some tens of roundings.
    bound = 40 * torch.finfo(dtype).eps * float(np.abs(exact).max())
    for elements in (1 << 26, 64 * 90):
        monkeypatch.setattr(_rfam_agop_cuda, "_ELEMENTS", elements)
        got = agop(u, z, coef, LENGTH, 1.0, weight)
        assert got.dtype is torch.float64
        assert np.abs(got.cpu().numpy() - exact).max() <= bound


class _Operators(TorchDispatchMode):
    """Torch's operators with the sizes of what they make."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.made.append((func.overloadpacket.__name__, result.numel()))
        return result


def test_two_launches_and_no_array_of_gradients(device):
    """The kernel, and the sum of what its blocks found."""
    u, coef = _points(97, 20, torch.float64, device), _points(97, 3, torch.float64, device)
    with _Operators() as seen:
        _launches(lambda: agop(u, u, coef, LENGTH, 1.0), device)
    assert [name for name, _ in seen.made] == ["new_empty", "sum"]
    assert seen.made[0][1] <= 13 * 20 * 20  # a part for 8 rows, not 3 x 20 numbers for each


def test_empty_input(device):
    u, coef = torch.zeros(4, 3, device=device), torch.zeros(4, 2, device=device)
    for args in ((u[:0], u, coef), (u, u[:0], coef[:0]), (u, u, coef[:, :0])):
        assert torch.equal(agop(*args, 1.0, 1.0).cpu(), torch.zeros(3, 3, dtype=torch.float64))
    assert agop(u[:, :0], u[:, :0], coef, 1.0, 1.0).shape == (0, 0)
    assert agop(u[None][:0], u[None][:0], coef[None][:0], 1.0, 1.0).shape == (0, 3, 3)


def test_bad_calls_are_refused():
    if "emulated" not in gpu_devices():
        pytest.skip("asks the emulated kernels")

    def call(length=1.0, count=1, m=1, width=1, c=1, x=0):
        _load._emu.agop_f32(1.0, length, count, 0, 0, m, 1, width, c, x, x, x, 0, 0, 0, 0)

    with pytest.raises(ValueError, match="width must be at most 64, got 65"):
        call(width=65)
    with pytest.raises(ValueError, match="must be positive"):
        call(length=0.0)
    with pytest.raises(ValueError, match="count must be at most 65535"):
        call(count=70000)
    with pytest.raises(ValueError, match="c must be at most 65535"):
        call(c=70000)
    with pytest.raises(ValueError, match="m must be at least 1, got 0"):
        call(m=0)
    with pytest.raises(ValueError, match="x has no memory"):
        call()
    with pytest.raises(ValueError, match="width must be at most 64"):
        _load._emu.agop_parts_f64(1, 1, 65, 1, 0)
