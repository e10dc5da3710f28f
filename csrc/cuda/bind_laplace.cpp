#include "bind_gpu.h"
#include "laplace.h"

namespace normalign {
namespace {

template <class T>
GpuKernel<T> make_kernel(double exponent, double length) {
  if (!(exponent > 0) || !(length > 0))
    throw std::invalid_argument("exponent and length must be positive");
  return {static_cast<T>(exponent), static_cast<T>(1 / length)};
}

void check_shape(int64_t m, int64_t n, int width) {
  check_size("m", m, 1);
  check_size("n", n, 1);
  check_size("width", width);
  // A grid has at most 65535 tiles of 64 points in its second direction.
  if (m > 4000000) throw std::invalid_argument("m must be at most 4000000: split the rows");
}

template <class T>
void gram(double exponent, double length, bool weights, int64_t m, int64_t n, int width, Address x,
          Address z, Address out, int device, Address stream) {
  check_shape(m, n, width);
  const DeviceGuard guard(device);
  check(laplace_gram_gpu(make_kernel<T>(exponent, length), weights, m, n, width,
                         pointer<const T>("x", x, width), pointer<const T>("z", z, width),
                         pointer<T>("out", out, 1), stream_of(stream)));
}

template <class T>
void matvec(double exponent, double length, int64_t m, int64_t n, int width, int c, int parts,
            Address x, Address z, Address coef, Address out, int device, Address stream) {
  check_shape(m, n, width);
  check_size("c", c, 1);
  check_size("parts", parts, 1);
  const DeviceGuard guard(device);
  check(laplace_matvec_gpu(make_kernel<T>(exponent, length), m, n, width, c, parts,
                           pointer<const T>("x", x, width), pointer<const T>("z", z, width),
                           pointer<const T>("coef", coef, 1), pointer<T>("out", out, 1),
                           stream_of(stream)));
}

template <class T>
void gradient(double exponent, double length, int64_t m, int64_t n, int width, int c, int parts,
              Address x, Address z, Address coef, Address cotangent, Address out, int device,
              Address stream) {
  check_shape(m, n, width);
  check_size("width", width, 1);
  check_size("c", c, 1);
  check_size("parts", parts, 1);
  const DeviceGuard guard(device);
  check(laplace_gradient_gpu(
      make_kernel<T>(exponent, length), m, n, width, c, parts, pointer<const T>("x", x, 1),
      pointer<const T>("z", z, 1), pointer<const T>("coef", coef, 1),
      pointer<const T>("cotangent", cotangent, 1), pointer<T>("out", out, 1), stream_of(stream)));
}

}  // namespace

void bind_laplace_gpu(py::module_& m) {
  m.def("laplace_gram_f32", &gram<float>);
  m.def("laplace_gram_f64", &gram<double>);
  m.def("laplace_matvec_f32", &matvec<float>);
  m.def("laplace_matvec_f64", &matvec<double>);
  m.def("laplace_gradient_f32", &gradient<float>);
  m.def("laplace_gradient_f64", &gradient<double>);
}

}  // namespace normalign
