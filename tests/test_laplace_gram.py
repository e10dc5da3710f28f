"""Kernel ops against numpy float64 definitions, on every instruction set."""

import numpy as np
import pytest
import torch

import normalign
from normalign._rfam_agop import agop_method
from normalign.testing import LAYOUTS, hide_native, instruction_set, isa_names

KERNELS = {"laplace": 1.0, "gaussian": 2.0, 1.4: 1.4}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def _exact_pairs(x, z, m, bandwidth, kernel):
    """Differences, K and -K'(D)/D in float64."""
    x, z, m = (np.asarray(t, np.float64) for t in (x, z, m))
    delta = x[:, None] - z[None]
    distance = np.sqrt(np.maximum(np.einsum("ijd,de,ije->ij", delta, m, delta), 0))
    q = KERNELS[kernel]
    length = bandwidth * np.sqrt(2) if kernel == "gaussian" else bandwidth
    k = np.exp(-((distance / length) ** q))
    with np.errstate(divide="ignore", invalid="ignore"):
        w = np.where(distance > 0, q / length**2 * (distance / length) ** (q - 2) * k, 0.0)
    return delta, k, w


def _inputs(m, n, d, c, dtype):
    g = torch.Generator().manual_seed(m + 100 * n + d)
    root = torch.randn(d, d, generator=g, dtype=torch.float64)
    matrix = (root @ root.T / d).to(dtype)
    x, z, coef = (
        torch.randn(*s, generator=g, dtype=torch.float64).to(dtype)
        for s in ((m, d), (n, d), (n, c))
    )
    return x, z, matrix, coef


def _close(actual, exact, dtype, units=64):
    """Within rounding of sums of about a hundred terms, relative to the largest."""
    scale = max(np.abs(exact).max(), 1e-30) if exact.size else 1.0
    error = np.abs(actual.double().numpy() - exact).max() if exact.size else 0.0
    assert error <= units * torch.finfo(dtype).eps * scale, error / scale


SHAPES = [(0, 3, 2), (3, 0, 2), (1, 1, 1), (7, 49, 3), (48, 48, 5), (97, 31, 40)]


@pytest.mark.parametrize("isa", isa_names())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gram_matvec_and_gradient(isa, dtype, kernel, shape):
    m, n, d = shape
    x, z, matrix, coef = _inputs(m, n, d, 3, dtype)
    cotangent = torch.randn(m, 3).to(dtype)
    delta, k, w = _exact_pairs(x, z, matrix, 2.0, kernel)
    with instruction_set(isa):
        _close(normalign.laplace_gram(x, z, matrix, 2.0, kernel=kernel), k, dtype)
        f = normalign.laplace_matvec(x, z, matrix, 2.0, coef, kernel=kernel)
        _close(f, k @ coef.double().numpy(), dtype)
        g = normalign.input_gradient(x, z, matrix, 2.0, coef, cotangent, kernel=kernel)
    s = w * (cotangent.double().numpy() @ coef.double().numpy().T)
    exact = -np.einsum("ij,ijd->id", s, delta) @ matrix.double().numpy()
    _close(g, exact, dtype, units=256)


@pytest.mark.parametrize("isa", isa_names())
def test_laplace_values_over_the_whole_range(isa):
    """From distances whose square is denormal to values that are, and beyond, to 0."""
    steps = torch.cat([torch.logspace(-22, -1, 300), torch.linspace(0.1, 6.8, 1500)])
    x, zero = steps[:, None].expand(-1, 256), torch.zeros(1, 256)
    distance = 16 * steps.double()
    k, w = torch.exp(-distance), torch.exp(-distance) / distance
    with instruction_set(isa):
        found = normalign.laplace_gram(x, zero, None, 1.0)[:, 0].double()
        g = normalign.input_gradient(x, zero, None, 1.0, torch.ones(1, 1), torch.ones(len(x), 1))
    # A distance changes K by its error. 256 equal squares add up, rounded the same way each time.
    allowed = 24 * (1 + distance) * torch.finfo(torch.float32).eps
    least = 3e-45  # two of the smallest numbers that there are
    assert ((found - k).abs() <= allowed * k + least).all()
    slope, exact = -g[:, 0].double(), w * steps.double()
    error = (slope - exact).abs() - allowed * exact - least * (1 + steps)
    assert (error[distance > 1e-15] <= 0).all()  # squares of smaller ones have few digits, or none
    assert ((slope >= 0) & (slope <= 1.01 * distance.clamp(max=1) / distance / 16)).all()


@pytest.mark.parametrize("isa", isa_names())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", ["auto", "tiles", "streamed", "gram"])
@pytest.mark.parametrize(
    ("n", "d", "c", "kernel"),
    [(1, 2, 1, "laplace"), (50, 3, 1, "gaussian"), (97, 20, 4, "laplace"), (60, 5, 7, 1.4)],
)
def test_agop_forms(isa, dtype, method, n, d, c, kernel):
    x, _, matrix, _ = _inputs(n, 1, d, c, dtype)
    coef = torch.randn(n, c).to(dtype)
    delta, _, w = _exact_pairs(x, x, matrix, 3.0, kernel)
    g = -np.einsum("ij,jc,ijd->icd", w, coef.double().numpy(), delta) @ matrix.double().numpy()
    with instruction_set(isa):
        actual = normalign.agop(x, x, matrix, 3.0, coef, kernel=kernel, method=method)
    _close(actual, np.einsum("icd,ice->de", g, g) / n, dtype, units=1024)


@pytest.mark.parametrize("method", ["tiles", "streamed", "gram"])
def test_agop_with_two_threads_and_many_classes(method):
    x, _, matrix, _ = _inputs(200, 1, 6, 1, torch.float64)
    coef = torch.randn(200, 70, dtype=torch.float64)  # more than one group of classes
    one = normalign.agop(x, x, matrix, 3.0, coef, method=method)
    torch.set_num_threads(2)
    torch.testing.assert_close(normalign.agop(x, x, matrix, 3.0, coef, method=method), one)
    delta, _, w = _exact_pairs(x, x, matrix, 3.0, "laplace")
    g = -np.einsum("ij,jc,ijd->icd", w, coef.numpy(), delta) @ matrix.numpy()
    _close(one, np.einsum("icd,ice->de", g, g) / 200, torch.float64, units=1024)


def test_agop_form_follows_the_products_that_it_needs():
    assert agop_method(1000, 1000, 3, 20, square=True) == "tiles"
    assert agop_method(500, 500, 10, 500, square=True) == "gram"  # 5010 columns against n / 2
    assert agop_method(100, 1000, 3, 20, square=False) == "streamed"


def test_agop_keeps_nan():
    x, _, matrix, coef = _inputs(60, 60, 4, 2, torch.float32)
    x[:] = float("nan")
    for method in ("tiles", "streamed", "gram"):
        assert normalign.agop(x, x, matrix, 2.0, coef, method=method).isnan().all(), method


def test_agop_of_tiny_gradients_does_not_vanish():
    x, _, matrix, coef = _inputs(60, 60, 4, 2, torch.float32)
    exact = normalign.agop(x, x, matrix, 2.0, coef)
    for method in ("tiles", "streamed"):
        small = normalign.agop(x, x, matrix, 2.0, coef * 1e-15, method=method)
        torch.testing.assert_close(small * 1e30, exact)


@pytest.mark.parametrize("isa", isa_names())
def test_offset_unit_diagonal_and_symmetry(isa):
    x, _, matrix, _ = _inputs(100, 1, 40, 1, torch.float32)
    x = (x * 8).round() / 8  # so that x + 1e4 is exact, and only the kernel's rounding is seen
    with instruction_set(isa):
        k = normalign.laplace_gram(x, x, matrix, 5.0)
        far = normalign.laplace_gram(x + 1e4, x + 1e4, matrix, 5.0)
    assert torch.equal(k.diagonal(), torch.ones(100))
    assert torch.equal(k, k.T)
    torch.testing.assert_close(far, k, atol=2e-6, rtol=0)


@pytest.mark.parametrize("isa", isa_names())
@pytest.mark.parametrize("kernel", KERNELS)
def test_nan_stays_in_its_row(isa, kernel):
    x, z, matrix, _ = _inputs(60, 50, 4, 1, torch.float32)
    x[3, 1] = float("nan")
    z[7, 2] = float("nan")
    with instruction_set(isa):
        k = normalign.laplace_gram(x, z, matrix, 2.0, kernel=kernel)
    expected = torch.zeros(60, 50, dtype=torch.bool)
    expected[3], expected[:, 7] = True, True
    assert torch.equal(torch.isnan(k), expected)


def test_far_points_give_zero_not_nan():
    x = torch.tensor([[0.0], [1e18]])
    k = normalign.laplace_gram(x, x, None, 1.0)
    assert torch.equal(k, torch.eye(2))
    g = normalign.input_gradient(x, x, None, 1.0, torch.ones(2, 1), torch.ones(2, 1))
    assert torch.equal(g, torch.zeros(2, 1))


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients(kernel):
    x, z, matrix, coef = _inputs(4, 5, 3, 2, torch.float64)
    inputs = tuple(t.requires_grad_() for t in (x, z, matrix))
    symmetric = lambda m: (m + m.T) / 2  # noqa: E731
    f = lambda x, z, m: normalign.laplace_gram(x, z, symmetric(m), 2.0, kernel=kernel)  # noqa: E731
    assert torch.autograd.gradcheck(f, inputs)
    assert torch.autograd.gradgradcheck(f, inputs)
    h = lambda x, z, m, a: normalign.laplace_matvec(  # noqa: E731
        x, z, symmetric(m), 2.0, a, kernel=kernel
    )
    assert torch.autograd.gradcheck(h, (*inputs, coef.requires_grad_()))


@pytest.mark.parametrize("implementation", ["native", "reference"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_of_gradients(kernel, implementation, monkeypatch):
    monkeypatch.setenv("NORMALIGN_IMPL", implementation)
    x, z, matrix, coef = _inputs(3, 4, 2, 2, torch.float64)
    cotangent = torch.randn(3, 2, dtype=torch.float64)
    x, z, matrix, coef, cotangent = (t.requires_grad_() for t in (x, z, matrix, coef, cotangent))

    def gradient(x, z, m, coef, cotangent):
        return normalign.input_gradient(x, z, (m + m.T) / 2, 2.0, coef, cotangent, kernel=kernel)

    assert torch.autograd.gradcheck(gradient, (x, z, matrix, coef, cotangent))
    assert torch.autograd.gradgradcheck(gradient, (x, z, matrix, coef, cotangent))

    def outer(x, z, m, coef):
        return normalign.agop(x, z, (m + m.T) / 2, 2.0, coef, kernel=kernel)

    assert torch.autograd.gradcheck(outer, (x, z, matrix, coef))
    own = (
        z[:, :1].detach().clone().requires_grad_()
    )  # at the machine's own points: x and z are one tensor
    assert torch.autograd.gradcheck(lambda x, a: outer(x, x, matrix, a), (z, own))


def test_gradient_at_equal_points_is_zero():
    x = torch.randn(3, 2, requires_grad=True)
    normalign.laplace_gram(x, x.detach().clone(), None, 2.0).diagonal().sum().backward()
    assert torch.equal(x.grad, torch.zeros(3, 2))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_equal_contiguous(layout):
    x0, z0, matrix, coef0 = _inputs(9, 11, 6, 3, torch.float32)
    results = []
    for change in (LAYOUTS[layout], lambda t: LAYOUTS[layout](t).contiguous()):
        x, z, coef = (change(t).detach().requires_grad_() for t in (x0, z0, coef0))
        k = normalign.laplace_gram(x, z, matrix, 2.0)
        f = normalign.laplace_matvec(x, z, matrix, 2.0, coef)
        (k.sum() + f.square().sum()).backward()
        r = normalign.agop(x.detach(), z.detach(), matrix, 2.0, coef.detach())
        results.append((k.detach(), f.detach(), x.grad, z.grad, coef.grad, r))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("implementation", ["native", "reference"])
def test_opcheck_and_full_graph_compile(implementation, monkeypatch):
    monkeypatch.setenv("NORMALIGN_IMPL", implementation)
    x, z, matrix, coef = _inputs(4, 5, 3, 2, torch.float32)
    x.requires_grad_()
    ops = torch.ops.normalign
    torch.library.opcheck(ops.laplace_gram.default, (x, z, matrix, 2.0, 1.0))
    torch.library.opcheck(ops.laplace_matvec.default, (x, z, matrix, coef, 2.0, 1.0))
    torch.library.opcheck(ops.agop.default, (x, None, matrix, z[:4, :1], 2.0, 1.0, "auto"))
    torch.library.opcheck(
        ops.input_gradient.default, (x, z, matrix, coef, torch.ones(4, 2), 2.0, 1.0)
    )
    x = x.detach()
    compiled = torch.compile(normalign.laplace_gram, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        compiled(x, z, matrix, 2.0), normalign.laplace_gram(x, z, matrix, 2.0)
    )


def test_without_the_extension():
    x, z, matrix, coef = _inputs(6, 9, 4, 2, torch.float32)
    expected = (
        normalign.laplace_gram(x, z, matrix, 2.0),
        normalign.laplace_matvec(x, z, matrix, 2.0, coef),
        normalign.agop(x, z, matrix, 2.0, coef),
    )
    with hide_native():
        found = (
            normalign.laplace_gram(x, z, matrix, 2.0),
            normalign.laplace_matvec(x, z, matrix, 2.0, coef),
            normalign.agop(x, z, matrix, 2.0, coef),
        )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("isa", isa_names())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("n", [1, 47, 49, 500])
def test_kernel_solve(isa, dtype, threads, n):
    x, _, matrix, _ = _inputs(n, 1, 5, 1, dtype)
    _, k, _ = _exact_pairs(x, x, matrix, 2.0, "laplace")
    y = torch.randn(n, 19).to(dtype)
    torch.set_num_threads(threads)
    with instruction_set(isa):
        coef, jitter = normalign.kernel_solve(torch.from_numpy(k).to(dtype), y, 0.1)
    exact = np.linalg.solve(k + 0.1 * np.eye(n), y.double().numpy())
    _close(coef, exact, dtype, units=20 * n + 64)  # the condition number is below 10 n
    assert jitter == 0.0


def test_kernel_solve_in_float64_on_request():
    x, _, matrix, _ = _inputs(60, 1, 2, 1, torch.float32)
    k = normalign.laplace_gram(x, x, matrix, 50.0)
    y = torch.randn(60, 2)
    exact = np.linalg.solve(k.double().numpy() + 1e-3 * np.eye(60), y.double().numpy())
    coef, _ = normalign.kernel_solve(k, y, 1e-3, dtype=torch.float64)
    assert coef.dtype is torch.float32
    _close(coef, exact, torch.float32, units=2)


def test_kernel_solve_warns_once_and_leaves_its_input():
    k = torch.ones(40, 40)
    before = k.clone()
    with pytest.warns(RuntimeWarning, match="was added to its diagonal") as record:
        coef, jitter = normalign.kernel_solve(k, torch.ones(40, 1))
    assert len(record) == 1
    assert jitter > 0
    assert torch.equal(k, before)
    torch.testing.assert_close(coef.sum(), torch.tensor(1.0), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: normalign.laplace_gram(x, x[:, :2], None, 1.0), ValueError, "z must have 3 col"),
        (lambda x: normalign.laplace_gram(x, x.double(), None, 1.0), TypeError, "z must have the"),
        (lambda x: normalign.laplace_gram(x, x, None, 0.0), ValueError, "bandwidth must be posit"),
        (lambda x: normalign.laplace_gram(x, x, -torch.eye(3), 1.0), ValueError, "semi-definite"),
        (lambda x: normalign.laplace_gram(x, x, torch.eye(2), 1.0), ValueError, r"shape \(3, 3\)"),
        (lambda x: normalign.laplace_gram(x, x, None, 1.0, kernel="cubic"), ValueError, "kernel"),
        (lambda x: normalign.laplace_matvec(x, x, None, 1.0, x[:2]), ValueError, "coef must have"),
        (lambda x: normalign.agop(x, x, None, 1.0, x, method="fast"), ValueError, "method must be"),
        (
            lambda x: normalign.agop(x, x + 1, None, 1.0, x, method="gram"),
            ValueError,
            "needs gradients at the machine's own points",
        ),
        (lambda x: normalign.kernel_solve(x, x), ValueError, r"gram must have shape \(any, 4\)"),
        (
            lambda x: normalign.kernel_solve(x[:3], x[:3], -1.0),
            ValueError,
            "reg must not be negative",
        ),
        (
            lambda x: normalign.kernel_solve(x[:3] * float("nan"), x[:3]),
            ValueError,
            "could not be factored",
        ),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.ones(4, 3))
