// The Python face of the CUDA kernels. Compiled as _cuda, and as _emu with the emulated ones; the
// arguments of both are the same, and end with a device number and a stream.
#include "bind_gpu.h"

namespace normalign {

void bind_agop_gpu(py::module_& m);
void bind_attack_gpu(py::module_& m);
void bind_cholesky_gpu(py::module_& m);
void bind_laplace_gpu(py::module_& m);
void bind_stack_gpu(py::module_& m);

namespace {

template <class T>
void projection(int64_t rows, int64_t cols, Address g, int64_t g_stride, Address x,
                int64_t x_stride, Address r, int64_t r_stride, Address squared_norm, int device,
                Address stream) {
  check_size("rows", rows);
  check_size("cols", cols);
  if (rows == 0) return;
  const int64_t n = rows * cols;
  const DeviceGuard guard(device);
  check(projection_gpu<T>(rows, cols, pointer<const T>("g", g, n), g_stride,
                          pointer<const T>("x", x, n), x_stride, pointer<T>("r", r, n), r_stride,
                          pointer<T>("squared_norm", squared_norm, rows), stream_of(stream)));
}

template <class T>
void projection_backward(int64_t rows, int64_t cols, Address g, int64_t g_stride, Address x,
                         int64_t x_stride, Address grad_r, int64_t grad_r_stride,
                         Address grad_squared_norm, int64_t norm_stride, Address grad_g,
                         Address grad_x, int device, Address stream) {
  check_size("rows", rows);
  check_size("cols", cols);
  if (rows == 0 || cols == 0) return;
  const int64_t n = rows * cols;
  const DeviceGuard guard(device);
  check(projection_backward_gpu<T>(
      rows, cols, pointer<const T>("g", g, n), g_stride, pointer<const T>("x", x, n), x_stride,
      reinterpret_cast<const T*>(grad_r), grad_r_stride,
      reinterpret_cast<const T*>(grad_squared_norm), norm_stride, pointer<T>("grad_g", grad_g, n),
      reinterpret_cast<T*>(grad_x), stream_of(stream)));
}

}  // namespace
}  // namespace normalign

PYBIND11_MODULE(NORMALIGN_GPU_MODULE, m) {
  using namespace normalign;
#if defined(NORMALIGN_WITH_CUDART)
  m.attr("architectures") = NORMALIGN_CUDA_ARCHITECTURES;
  m.def("runtime_version", [] {
    int version = 0;
    cudaRuntimeGetVersion(&version);
    return version;
  });
  m.def("driver_version", [] {
    int version = 0;  // stays so without a driver
    cudaDriverGetVersion(&version);
    return version;
  });
#else
  m.attr("architectures") = "emulated";
  m.def("launches", &emu::launches);
  m.def("launched_on", [](uint64_t k) {
    const auto [device, stream] = emu::launched(k);
    return py::make_tuple(device, reinterpret_cast<Address>(stream));
  });
  m.def("set_shared_limit", &emu::set_shared_limit);
  m.def("current_device", &emu::get_device);
#endif
  m.def("orthogonal_projection_f32", &projection<float>);
  m.def("orthogonal_projection_f64", &projection<double>);
  m.def("orthogonal_projection_backward_f32", &projection_backward<float>);
  m.def("orthogonal_projection_backward_f64", &projection_backward<double>);
  bind_agop_gpu(m);
  bind_attack_gpu(m);
  bind_cholesky_gpu(m);
  bind_laplace_gpu(m);
  bind_stack_gpu(m);
}
