#include "bind_gpu.h"
#include "cholesky.h"

namespace normalign {
namespace {

template <class T>
void cholesky_solve(int count, int64_t n, int64_t c, Address sizes, Address ridge, Address k,
                    Address y, Address info, int device, Address stream) {
  check_size("count", count);
  check_size("n", n, 1);
  check_size("c", c);
  if (count == 0) return;
  const DeviceGuard guard(device);
  const GpuSystems<T> systems{count,
                              n,
                              c,
                              reinterpret_cast<const int*>(sizes),
                              reinterpret_cast<const T*>(ridge),
                              pointer<T>("k", k, n),
                              pointer<T>("y", y, c),
                              pointer<T>("info", info, 3)};
  check(cholesky_solve_gpu(systems, stream_of(stream)));
}

}  // namespace

void bind_cholesky_gpu(py::module_& m) {
  m.def("cholesky_solve_f64", &cholesky_solve<double>);
}

}  // namespace normalign
