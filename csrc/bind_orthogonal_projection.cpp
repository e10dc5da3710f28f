#include "bind.h"
#include "dispatch.h"
#include "orthogonal_projection.h"

namespace normalign {
namespace {

template <class T>
void call(int64_t rows, int64_t cols, Address g, int64_t g_stride, Address x, int64_t x_stride,
          Address r, int64_t r_stride, Address squared_norm, int threads) {
  check_size("rows", rows);
  check_size("cols", cols);
  if (rows == 0) return;
  const int64_t n = rows * cols;
  const T* gp = pointer<const T>("g", g, n);
  const T* xp = pointer<const T>("x", x, n);
  T* rp = pointer<T>("r", r, n);
  T* sp = pointer<T>("squared_norm", squared_norm, rows);
  const auto& table = NORMALIGN_SELECT(orthogonal_projection);
  py::gil_scoped_release release;
  if constexpr (sizeof(T) == 4)
    table.f32(rows, cols, gp, g_stride, xp, x_stride, rp, r_stride, sp, threads);
  else
    table.f64(rows, cols, gp, g_stride, xp, x_stride, rp, r_stride, sp, threads);
}

}  // namespace

void bind_orthogonal_projection(py::module_& m) {
  m.def("orthogonal_projection_f32", &call<float>);
  m.def("orthogonal_projection_f64", &call<double>);
}

}  // namespace normalign
