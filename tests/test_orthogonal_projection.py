import pytest
import torch

import normalign
from normalign import reference
from normalign.testing import (
    DTYPES,
    LAYOUTS,
    SIZES,
    assert_as_accurate,
    hide_native,
    instruction_set,
    isa_names,
)


def _exact(g, x):
    return reference.orthogonal_projection(g.double(), x.double())


@pytest.mark.parametrize("isa", isa_names())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cols", SIZES)
@pytest.mark.parametrize("rows", [0, 1, 13])
def test_native_is_as_accurate_as_reference(isa, dtype, layout, rows, cols):
    g = LAYOUTS[layout](torch.randn(rows, cols, dtype=dtype))
    x = LAYOUTS[layout](torch.randn(rows, cols, dtype=dtype))
    with instruction_set(isa):
        native = normalign.orthogonal_projection(g, x)
    size = g.abs().max().item() if g.numel() else 0.0  # with one column the exact result is 0
    scales = (size, cols * size**2)
    for n, r, e, scale in zip(
        native, reference.orthogonal_projection(g, x), _exact(g, x), scales, strict=True
    ):
        assert_as_accurate(n, r, e, scale=scale)


@pytest.mark.parametrize("isa", isa_names())
def test_rows_are_independent_of_threads(isa):
    g, x = torch.randn(2000, 97), torch.randn(2000, 97)
    results = []
    with instruction_set(isa):
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(normalign.orthogonal_projection(g, x))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("isa", isa_names())
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_stays_in_its_row(isa, bad):
    g, x = torch.randn(3, 33), torch.randn(3, 33)
    x[1, 20] = bad
    with instruction_set(isa):
        r, squared_norm = normalign.orthogonal_projection(g, x)
    assert torch.isnan(squared_norm).tolist() == [False, True, False]
    assert torch.isfinite(r[[0, 2]]).all()


def test_zero_direction_removes_nothing():
    g = torch.randn(2, 5)
    r, squared_norm = normalign.orthogonal_projection(g, torch.zeros(2, 5))
    assert torch.equal(r, g)
    torch.testing.assert_close(squared_norm, (g * g).sum(1))


def test_parallel_rows_vanish_and_denormals_survive():
    x = torch.randn(4, 40, dtype=torch.float64)
    _, squared_norm = normalign.orthogonal_projection(3 * x, x)
    assert (squared_norm <= 1e-28 * (x * x).sum(1)).all()  # rounding of 40 terms, squared
    g = torch.full((1, 8), 1e-40)
    x = torch.tensor([[1.0] + [0.0] * 7])
    r, _ = normalign.orthogonal_projection(g, x)
    assert torch.equal(r[0, 1:], g[0, 1:])


@pytest.mark.parametrize("which", ["g", "x", "both"])
def test_gradients(which):
    g = torch.randn(5, 7, dtype=torch.float64, requires_grad=which != "x")
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=which != "g")
    assert torch.autograd.gradcheck(normalign.orthogonal_projection, (g, x))
    assert torch.autograd.gradgradcheck(normalign.orthogonal_projection, (g, x))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_backward_of_any_layout_equals_contiguous(layout):
    g0, x0 = LAYOUTS[layout](torch.randn(6, 9)), LAYOUTS[layout](torch.randn(6, 9))
    gradients = []
    for g, x in ((g0, x0), (g0.contiguous(), x0.contiguous())):
        g, x = g.detach().requires_grad_(), x.detach().requires_grad_()
        sum(t.sum() for t in normalign.orthogonal_projection(g, x)).backward()
        gradients.append((g.grad, x.grad))
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("implementation", ["native", "reference"])
def test_opcheck_and_full_graph_compile(implementation, monkeypatch):
    monkeypatch.setenv("NORMALIGN_IMPL", implementation)
    g, x = torch.randn(4, 9, requires_grad=True), torch.randn(4, 9, requires_grad=True)
    torch.library.opcheck(torch.ops.normalign.orthogonal_projection.default, (g, x))
    compiled = torch.compile(normalign.orthogonal_projection, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(g, x), normalign.orthogonal_projection(g, x))


def test_other_dtypes_use_the_reference(monkeypatch):
    g, x = torch.randn(2, 3).bfloat16(), torch.randn(2, 3).bfloat16()
    assert normalign.orthogonal_projection(g, x)[0].dtype is torch.bfloat16
    monkeypatch.setenv("NORMALIGN_IMPL", "native")
    with pytest.raises(RuntimeError, match=r"native implementation was asked for.*bfloat16"):
        normalign.orthogonal_projection(g, x)


def test_without_the_extension(monkeypatch):
    g, x = torch.randn(2, 3), torch.randn(2, 3)
    expected = normalign.orthogonal_projection(g, x)
    with hide_native():
        torch.testing.assert_close(normalign.orthogonal_projection(g, x), expected)
        monkeypatch.setenv("NORMALIGN_IMPL", "native")
        with pytest.raises(RuntimeError, match="hidden"):
            normalign.orthogonal_projection(g, x)


@pytest.mark.parametrize(
    ("g", "x", "error", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 4), ValueError, r"x must have shape \(2, 3\), got"),
        (torch.zeros(3), torch.zeros(3), ValueError, r"g must have shape \(any, any\), got \(3,\)"),
        (torch.zeros(2, 3), torch.zeros(2, 3).double(), TypeError, "x must have the dtype of g"),
        (torch.zeros(2, 3).long(), torch.zeros(2, 3), TypeError, "g must have a floating-point"),
        (torch.zeros(2, 3), torch.zeros(2, 3, device="meta"), ValueError, "x must be on the dev"),
        ([[1.0]], torch.zeros(1, 1), TypeError, "g must be a torch.Tensor, got list"),
    ],
)
def test_bad_input(g, x, error, message):
    with pytest.raises(error, match=message):
        normalign.orthogonal_projection(g, x)
