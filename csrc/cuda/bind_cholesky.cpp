#include <pybind11/stl.h>

#include "bind_gpu.h"
#include "cholesky.h"

namespace normalign {
namespace {

template <class T>
void cholesky_solve(int count, int64_t n, int64_t c, Address sizes, Address ridge,
                    const std::vector<T>& ladder, Address k, Address targets, Address y,
                    Address diagonal, Address coef, Address jitter, int device, Address stream) {
  check_size("count", count);
  check_size("n", n, 1);
  check_size("c", c);
  check_size("ladder", int64_t(ladder.size()), 1);
  if (ladder.size() > size_t(longest_ladder))
    throw std::invalid_argument("ladder must have at most " + std::to_string(longest_ladder) +
                                " steps, got " + std::to_string(ladder.size()));
  if (count == 0) return;
  const DeviceGuard guard(device);
  GpuSystems<T> systems{count,
                        n,
                        c,
                        reinterpret_cast<const int*>(sizes),
                        reinterpret_cast<const T*>(ridge),
                        int(ladder.size()),
                        {},
                        pointer<T>("k", k, n),
                        pointer<const T>("targets", targets, c),
                        pointer<T>("y", y, c),
                        pointer<T>("diagonal", diagonal, n),
                        pointer<T>("coef", coef, c),
                        pointer<T>("jitter", jitter, 1)};
  for (size_t step = 0; step < ladder.size(); ++step) systems.ladder[step] = ladder[step];
  check(cholesky_solve_gpu(systems, stream_of(stream)));
}

template <class T>
void semidefinite_factor(int count, int64_t n, Address ranks, Address r, Address diagonal,
                         Address factor, int device, Address stream) {
  check_size("count", count);
  check_size("n", n, 1);
  if (count == 0) return;
  const DeviceGuard guard(device);
  const GpuSemidefinite<T> matrices{count,
                                    n,
                                    pointer<int>("ranks", ranks, 1),
                                    pointer<T>("r", r, n),
                                    pointer<T>("diagonal", diagonal, n),
                                    pointer<T>("factor", factor, n)};
  check(semidefinite_factor_gpu(matrices, stream_of(stream)));
}

}  // namespace

void bind_cholesky_gpu(py::module_& m) {
  m.def("cholesky_solve_f64", &cholesky_solve<double>);
  m.def("semidefinite_factor_f64", &semidefinite_factor<double>);
}

}  // namespace normalign
