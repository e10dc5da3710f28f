// The Python face of the CUDA kernels. Compiled as _cuda, and as _emu with the emulated ones; the
// arguments of both are the same, and end with a device number and a stream.
#include "../bind.h"

#include "launch.h"
#if defined(NORMALIGN_WITH_CUDART)
#include <cuda_runtime_api.h>
#else
#include "../emu/machine.h"
#endif

namespace normalign {
namespace {

void check(Status status) {
  if (status) throw std::runtime_error(std::string("CUDA launch failed: ") + status);
}

#if defined(NORMALIGN_WITH_CUDART)
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&before_));
    if (before_ == device) return;
    check_cuda(cudaSetDevice(device));
    changed_ = true;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  static void check_cuda(cudaError_t error) {
    if (error != cudaSuccess) check(cudaGetErrorString(error));
  }
  int before_ = 0;
  bool changed_ = false;
};
#else
struct DeviceGuard {
  explicit DeviceGuard(int) {}
};
#endif

Stream stream_of(Address stream) {
  return reinterpret_cast<Stream>(stream);
}

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
#else
  m.attr("architectures") = "emulated";
  m.def("launches", &emu::launches);
#endif
  m.def("orthogonal_projection_f32", &projection<float>);
  m.def("orthogonal_projection_f64", &projection<double>);
  m.def("orthogonal_projection_backward_f32", &projection_backward<float>);
  m.def("orthogonal_projection_backward_f64", &projection_backward<double>);
}
