"""The CUDA kernels of orthogonal_projection, emulated here and on the GPU where there is one."""

import pytest
import torch

import normalign
from normalign import _load, reference
from normalign.testing import DTYPES, LAYOUTS, assert_as_accurate, gpu_devices, on_gpu

# Around a pack, a warp's registers (2 and 8 packs a lane), a block's registers, and beyond them.
COLS = (0, 1, 3, 4, 5, 31, 33, 64, 65, 255, 256, 257, 784, 1028, 1500)
LONG = (4096, 4100)


@pytest.fixture(params=gpu_devices())
def device(request):
    with on_gpu(request.param) as device:
        yield device


def _check(g, x):
    native = normalign.orthogonal_projection(g, x)
    size = g.abs().max().item() if g.numel() else 0.0
    # The rounding of a sum of d terms, here added in another order than the reference's.
    scales = (size, g.shape[1] * size**2)
    exact = reference.orthogonal_projection(g.double(), x.double())
    for n, r, e, scale in zip(
        native, reference.orthogonal_projection(g, x), exact, scales, strict=True
    ):
        assert_as_accurate(n.cpu(), r.cpu(), e.cpu(), scale=scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", COLS)
def test_forward_of_every_width(device, dtype, cols, monkeypatch):
    monkeypatch.setenv("NORMALIGN_IMPL", "native")
    for rows in (0, 1, 13):
        g, x = (torch.randn(rows, cols, dtype=dtype, device=device) for _ in range(2))
        _check(g, x)


@pytest.mark.parametrize("cols", LONG)
def test_forward_of_long_rows(device, cols):
    _check(*(torch.randn(2, cols, device=device) for _ in range(2)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward_of_every_layout(device, layout):
    for cols in (33, 64):
        g, x = (LAYOUTS[layout](torch.randn(6, cols, device=device)) for _ in range(2))
        _check(g, x)


def _gradients(g, x, of_r, of_norm):
    g, x = g.detach().requires_grad_(), x.detach().requires_grad_()
    r, squared_norm = normalign.orthogonal_projection(g, x)
    total = 0
    if of_r is not None:
        total = total + (r * of_r).sum()
    if of_norm is not None:
        total = total + (squared_norm * of_norm).sum()
    return torch.autograd.grad(total, (g, x))


def _exact_gradients(g, x, of_r, of_norm):
    """By autograd through the reference, in float64."""
    g, x = (t.double().detach().requires_grad_() for t in (g, x))
    r, squared_norm = reference.orthogonal_projection(g, x)
    total = 0
    if of_r is not None:
        total = total + (r * of_r.double()).sum()
    if of_norm is not None:
        total = total + (squared_norm * of_norm.double()).sum()
    return torch.autograd.grad(total, (g, x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [1, 5, 64, 65, 300, 1028, 4100])
@pytest.mark.parametrize("parts", ["r", "norm", "both"])
def test_backward(device, dtype, cols, parts):
    g, x = (torch.randn(3, cols, dtype=dtype, device=device) for _ in range(2))
    of_r = torch.randn_like(g) if parts != "norm" else None
    of_norm = torch.randn(3, dtype=dtype, device=device) if parts != "r" else None
    # Products of three numbers near 1 over rows of d: a few roundings of sums of d terms each.
    eps = torch.finfo(dtype).eps
    for got, exact in zip(
        _gradients(g, x, of_r, of_norm), _exact_gradients(g, x, of_r, of_norm), strict=True
    ):
        bound = 20 * eps * (1 + exact.abs().max().item())
        assert (got.double() - exact).abs().max().item() <= bound


@pytest.mark.parametrize("layout", LAYOUTS)
def test_backward_of_every_layout(device, layout):
    g, x = (LAYOUTS[layout](torch.randn(6, 36, device=device)) for _ in range(2))
    of_r = LAYOUTS[layout](torch.randn(6, 36, device=device))
    of_norm = torch.ones((), device=device).expand(6)  # what sum().backward() gives: stride 0
    got = _gradients(g, x, of_r, of_norm)
    for a, b in zip(got, _exact_gradients(g, x, of_r, of_norm), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_zero_rows_and_nan_rows(device):
    g, x = (torch.randn(4, 40, device=device) for _ in range(2))
    x[1] = 0
    x[2, 7] = float("nan")
    r, squared_norm = normalign.orthogonal_projection(g, x)
    assert torch.equal(r[1], g[1])
    assert torch.isnan(squared_norm).tolist() == [False, False, True, False]
    grad_g, grad_x = _gradients(g, x, torch.ones_like(g), None)
    assert torch.equal(grad_g[1], torch.ones_like(g[1]))
    assert not grad_x[1].any()
    assert torch.isnan(grad_g[2]).all()


def test_any_number_of_derivatives(device):
    g, x = (
        torch.randn(3, 5, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2)
    )
    assert torch.autograd.gradcheck(normalign.orthogonal_projection, (g, x))
    assert torch.autograd.gradgradcheck(normalign.orthogonal_projection, (g, x))


def test_opcheck(device):
    g, x = (torch.randn(4, 9, device=device, requires_grad=True) for _ in range(2))
    torch.library.opcheck(torch.ops.normalign.orthogonal_projection.default, (g, x))
    for h, q, needs_x in ((g, None, True), (None, g[:, 0], False)):
        torch.library.opcheck(
            torch.ops.normalign.orthogonal_projection_backward.default,
            tuple(t.detach() if isinstance(t, torch.Tensor) else t for t in (g, x, h, q, needs_x)),
        )


def test_one_launch_each_way():
    if "emulated" not in gpu_devices():
        pytest.skip("launches are counted by the emulated kernels")
    g = torch.randn(5, 43, requires_grad=True)
    x = torch.randn(5, 43)
    with on_gpu("emulated"):
        before = _load._emu.launches()
        normalign.orthogonal_projection(g, x)[1].mean().backward()
        assert _load._emu.launches() - before == 2
