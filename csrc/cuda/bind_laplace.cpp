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

GpuBatch make_batch(int count, Address own_m, Address own_n) {
  check_size("count", count, 1);
  if (count > 65535) throw std::invalid_argument("count must be at most 65535: split the batch");
  return {count, reinterpret_cast<const int*>(own_m), reinterpret_cast<const int*>(own_n)};
}

template <class T>
void gram(double exponent, double length, int count, Address own_m, Address own_n, bool weights,
          int64_t m, int64_t n, int width, Address x, Address z, Address out, int device,
          Address stream) {
  check_shape(m, n, width);
  const DeviceGuard guard(device);
  check(laplace_gram_gpu(make_kernel<T>(exponent, length), make_batch(count, own_m, own_n), weights,
                         m, n, width, pointer<const T>("x", x, width),
                         pointer<const T>("z", z, width), pointer<T>("out", out, 1),
                         stream_of(stream)));
}

void gram_tensor(double exponent, double length, int count, Address own_m, Address own_n, bool bf16,
                 int64_t m, int64_t n, int width, Address x, Address z, Address out, int device,
                 Address stream) {
  check_shape(m, n, width);
  const DeviceGuard guard(device);
  check(laplace_gram_tensor_gpu(
      make_kernel<float>(exponent, length), make_batch(count, own_m, own_n), bf16, m, n, width,
      pointer<const float>("x", x, width), pointer<const float>("z", z, width),
      pointer<float>("out", out, 1), stream_of(stream)));
}

// The arguments that the streaming kernels share, checked.
template <class T>
struct StreamCall {
  GpuKernel<T> kernel;
  GpuBatch batch;
  StreamCall(double exponent, double length, int count, Address own_m, Address own_n, int64_t m,
             int64_t n, int width, int c, int parts, int results)
      : kernel(make_kernel<T>(exponent, length)), batch(make_batch(count, own_m, own_n)) {
    check_shape(m, n, width);
    check_size("c", c, 1);
    check_size("parts", parts, 1);
    check_size("width", results, 1);
    if (int64_t(count) * (results / 64 + 1) > 65535)
      throw std::invalid_argument("too many problems or columns for one launch: split the batch");
  }
};

template <class T>
void matvec(double exponent, double length, int count, Address own_m, Address own_n, int64_t m,
            int64_t n, int width, int c, int parts, Address x, Address z, Address coef, Address out,
            int device, Address stream) {
  const StreamCall<T> call(exponent, length, count, own_m, own_n, m, n, width, c, parts, c);
  const DeviceGuard guard(device);
  check(laplace_matvec_gpu(call.kernel, call.batch, m, n, width, c, parts,
                           pointer<const T>("x", x, width), pointer<const T>("z", z, width),
                           pointer<const T>("coef", coef, 1), pointer<T>("out", out, 1),
                           stream_of(stream)));
}

template <class T>
void gradient(double exponent, double length, int count, Address own_m, Address own_n, int64_t m,
              int64_t n, int width, int c, int parts, Address x, Address z, Address coef,
              Address cotangent, Address out, int device, Address stream) {
  const StreamCall<T> call(exponent, length, count, own_m, own_n, m, n, width, c, parts, width);
  const DeviceGuard guard(device);
  check(laplace_gradient_gpu(
      call.kernel, call.batch, m, n, width, c, parts, pointer<const T>("x", x, 1),
      pointer<const T>("z", z, 1), pointer<const T>("coef", coef, 1),
      pointer<const T>("cotangent", cotangent, 1), pointer<T>("out", out, 1), stream_of(stream)));
}

template <class T>
void jacobian(double exponent, double length, int count, Address own_m, Address own_n, int64_t m,
              int64_t n, int width, int c, int parts, Address x, Address z, Address coef,
              Address out, int device, Address stream) {
  const StreamCall<T> call(exponent, length, count, own_m, own_n, m, n, width, c, parts, c * width);
  const DeviceGuard guard(device);
  check(laplace_jacobian_gpu(call.kernel, call.batch, m, n, width, c, parts,
                             pointer<const T>("x", x, 1), pointer<const T>("z", z, 1),
                             pointer<const T>("coef", coef, 1), pointer<T>("out", out, 1),
                             stream_of(stream)));
}

template <class T>
void project(int count, int64_t m, int d, int width, Address table, Address x, Address factor,
             Address out, int device, Address stream) {
  make_batch(count, 0, 0);
  check_size("m", m, 1);
  check_size("d", d);
  check_size("width", width, 1);
  const DeviceGuard guard(device);
  check(project_gpu(count, m, d, width, pointer<const int>("table", table, 1),
                    pointer<const double>("x", x, d), pointer<const double>("factor", factor, d),
                    pointer<T>("out", out, 1), stream_of(stream)));
}

}  // namespace

void bind_laplace_gpu(py::module_& m) {
  m.def("laplace_gram_f32", &gram<float>);
  m.def("laplace_gram_f64", &gram<double>);
  m.def("laplace_gram_tensor_f32", &gram_tensor);
  m.def("laplace_matvec_f32", &matvec<float>);
  m.def("laplace_matvec_f64", &matvec<double>);
  m.def("laplace_gradient_f32", &gradient<float>);
  m.def("laplace_gradient_f64", &gradient<double>);
  m.def("laplace_jacobian_f32", &jacobian<float>);
  m.def("laplace_jacobian_f64", &jacobian<double>);
  m.def("laplace_project_f64", &project<double>);
}

}  // namespace normalign
