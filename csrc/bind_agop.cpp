#include "agop.h"
#include "bind.h"
#include "dispatch.h"

namespace normalign {
namespace {

template <class T>
const AgopOf<T>& agop_table() {
  const auto& table = NORMALIGN_SELECT(agop);
  if constexpr (sizeof(T) == 4)
    return table.f32;
  else
    return table.f64;
}

void check(int kernel, int64_t n, int64_t c, int64_t width, int64_t ldc, int threads) {
  if (kernel < 0 || kernel > 2)
    throw std::invalid_argument("kernel must be 0, 1 or 2, got " + std::to_string(kernel));
  check_size("n", n, 1);
  check_size("c", c, 1);
  check_size("width", width, 1);
  check_size("ldc", ldc, c);
  check_size("threads", threads, 1);
}

template <class T>
void tiles(int kernel, double exponent, int64_t n, int64_t c, int64_t width, Address panels,
           Address points, Address coef, int64_t ldc, Address weight, Address values, Address sums,
           Address block, Address r, int threads) {
  check(kernel, n, c, width, ldc, threads);
  const T* pp = pointer<const T>("panels", panels, n);
  const T* xp = pointer<const T>("points", points, n);
  const T* cp = pointer<const T>("coef", coef, n);
  const T* wp = reinterpret_cast<const T*>(weight);  // none where null
  T* vp = pointer<T>("values", values, n);
  T* sp = pointer<T>("sums", sums, n);
  T* bp = pointer<T>("block", block, n);
  double* rp = pointer<double>("r", r, n);
  py::gil_scoped_release release;
  agop_table<T>().tiles(kernel, static_cast<T>(exponent), n, c, width, pp, xp, cp, ldc, wp, vp, sp,
                        bp, rp, threads);
}

template <class T>
void streamed(int kernel, double exponent, int64_t m, int64_t n, int64_t c, int64_t width,
              Address x_panels, Address x, Address z_panels, Address z, Address coef, int64_t ldc,
              Address weight, Address values, Address sums, Address block, Address r, int threads) {
  check(kernel, n, c, width, ldc, threads);
  check_size("m", m, 1);
  const T* xpp = pointer<const T>("x_panels", x_panels, m);
  const T* xp = pointer<const T>("x", x, m);
  const T* zpp = pointer<const T>("z_panels", z_panels, n);
  const T* zp = pointer<const T>("z", z, n);
  const T* cp = pointer<const T>("coef", coef, n);
  const T* wp = reinterpret_cast<const T*>(weight);  // none where null
  T* vp = pointer<T>("values", values, n);
  T* sp = pointer<T>("sums", sums, n);
  T* bp = pointer<T>("block", block, n);
  double* rp = pointer<double>("r", r, n);
  py::gil_scoped_release release;
  agop_table<T>().streamed(kernel, static_cast<T>(exponent), m, n, c, width, xpp, xp, zpp, zp, cp,
                           ldc, wp, vp, sp, bp, rp, threads);
}

template <class T>
double gram(int kernel, double exponent, int64_t n, int64_t c, int64_t width, Address panels,
            Address points, Address coef, int64_t ldc, Address weight, Address w, Address lanes,
            Address padded_points, Address rows, Address r, int threads) {
  check(kernel, n, c, width, ldc, threads);
  const T* pp = pointer<const T>("panels", panels, n);
  const T* xp = pointer<const T>("points", points, n);
  const T* cp = pointer<const T>("coef", coef, n);
  const T* vp = reinterpret_cast<const T*>(weight);  // none where null
  T* wp = pointer<T>("w", w, n);
  T* lp = pointer<T>("lanes", lanes, n);
  T* dp = pointer<T>("padded_points", padded_points, n);
  T* sp = pointer<T>("rows", rows, n);
  double* rp = pointer<double>("r", r, n);
  py::gil_scoped_release release;
  return agop_table<T>().gram(kernel, static_cast<T>(exponent), n, c, width, pp, xp, cp, ldc, vp,
                              wp, lp, dp, sp, rp, threads);
}

}  // namespace

void bind_agop(py::module_& m) {
  m.def("agop_tiles_f32", &tiles<float>);
  m.def("agop_tiles_f64", &tiles<double>);
  m.def("agop_streamed_f32", &streamed<float>);
  m.def("agop_streamed_f64", &streamed<double>);
  m.def("agop_gram_f32", &gram<float>);
  m.def("agop_gram_f64", &gram<double>);
}

}  // namespace normalign
