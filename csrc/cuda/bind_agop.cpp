#include "agop.h"
#include "bind_gpu.h"

namespace normalign {
namespace {

void check_sizes(int64_t count, int64_t m, int64_t n, int64_t width, int64_t c) {
  check_size("count", count, 1);
  check_size("m", m, 1);
  check_size("n", n, 1);
  check_size("width", width, 1);
  check_size("c", c, 1);
  if (width > agop_widest)
    throw std::invalid_argument("width must be at most " + std::to_string(agop_widest) + ", got " +
                                std::to_string(width));
  if (count > 65535) throw std::invalid_argument("count must be at most 65535: split the batch");
  if (c > 65535) throw std::invalid_argument("c must be at most 65535: split the classes");
}

template <class T>
int64_t parts(int count, int64_t m, int width, int c, int device) {
  check_sizes(count, m, 1, width, c);
  const DeviceGuard guard(device);
  return agop_parts<T>(count, m, width, c);
}

template <class T>
void agop(double exponent, double length, int count, Address own_m, Address own_n, int64_t m,
          int64_t n, int width, int c, Address x, Address z, Address coef, Address weight,
          Address out, int device, Address stream) {
  check_sizes(count, m, n, width, c);
  if (!(exponent > 0) || !(length > 0))
    throw std::invalid_argument("exponent and length must be positive");
  GpuAgop<T> k{};
  k.kernel = {static_cast<T>(exponent), static_cast<T>(1 / length)};
  k.batch = {count, reinterpret_cast<const int*>(own_m), reinterpret_cast<const int*>(own_n)};
  k.m = m;
  k.n = n;
  k.width = width;
  k.c = c;
  k.x = pointer<const T>("x", x, 1);
  k.z = pointer<const T>("z", z, 1);
  k.coef = pointer<const T>("coef", coef, 1);
  k.weight = reinterpret_cast<const double*>(weight);  // none where null
  k.out = pointer<double>("out", out, 1);
  const DeviceGuard guard(device);
  check(agop_gpu(k, stream_of(stream)));
}

}  // namespace

void bind_agop_gpu(py::module_& m) {
  m.def("agop_parts_f32", &parts<float>);
  m.def("agop_parts_f64", &parts<double>);
  m.def("agop_f32", &agop<float>);
  m.def("agop_f64", &agop<double>);
}

}  // namespace normalign
