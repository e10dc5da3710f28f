"""The vector functions that kernels are built from, against a wider or a library arithmetic."""

import numpy as np
import pytest

from normalign import _load
from normalign.testing import instruction_set, isa_names

pytestmark = pytest.mark.skipif(_load._C is None, reason=str(_load.cpu_error))

FUNCTIONS = {"exp": np.exp, "exp2": np.exp2, "sqrt": np.sqrt, "log2": np.log2}
DTYPES = {"float32": np.float32, "float64": np.float64}


def _native(function, x):
    y = np.full_like(x, np.nan)
    f = _load._C.elementary_f32 if x.dtype == np.float32 else _load._C.elementary_f64
    f(function, len(x), x.ctypes.data, y.ctypes.data)
    return y


def _inputs(function, dtype):
    rng = np.random.default_rng(0)
    if function in ("sqrt", "log2"):
        return np.concatenate(
            [np.exp(rng.uniform(-102, 80, 20000)), rng.normal(1, 1e-3, 5000)]
        ).astype(dtype)
    # to both sides of overflow, of the smallest normal and of the smallest denormal number
    low, high = (-110, 95) if dtype == np.float32 else (-750, 715)
    scale = 1 if function == "exp" else np.log2(np.e)
    wide = rng.uniform(low * scale, high * scale, 40000)
    return np.concatenate([wide, rng.normal(0, 1, 20000), rng.normal(0, 1e-9, 1000)]).astype(dtype)


@pytest.mark.parametrize("isa", isa_names())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_within_units_in_the_last_place(isa, dtype, function):
    x = _inputs(function, DTYPES[dtype])
    with instruction_set(isa), np.errstate(over="ignore", under="ignore"):
        y = _native(function, x)
        exact = FUNCTIONS[function](x.astype(np.longdouble))
        rounded = exact.astype(x.dtype)
    assert np.array_equal(np.isinf(y), np.isinf(rounded))
    finite = np.isfinite(rounded)
    unit = np.spacing(np.abs(rounded[finite])).astype(np.longdouble)
    assert (np.abs(y[finite] - exact[finite]) / unit).max() < (4 if function == "log2" else 2)


@pytest.mark.parametrize("isa", isa_names())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17])
def test_special_values_at_every_length(isa, dtype, length):
    values = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e4, -1e4]
    x = np.resize(np.array(values, DTYPES[dtype]), length)
    one, inf, nan = 1.0, np.inf, np.nan
    with instruction_set(isa):
        for function, expected in {
            "exp": [one, one, inf, 0.0, nan, inf, 0.0],
            "exp2": [one, one, inf, 0.0, nan, inf, 0.0],
            "log2": [-inf, -inf, inf, nan, nan, np.log2(x.dtype.type(1e4)), nan],
            "sqrt": [0.0, -0.0, inf, nan, nan, 100.0, nan],
        }.items():
            np.testing.assert_array_equal(
                _native(function, x), np.resize(np.array(expected, x.dtype), length)
            )


def test_unknown_function_is_refused():
    with pytest.raises(ValueError, match="function must be exp, exp2, log2 or sqrt, got tan"):
        _load._C.elementary_f32("tan", 0, 0, 0)
