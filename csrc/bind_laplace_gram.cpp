#include "bind.h"
#include "cholesky.h"
#include "dispatch.h"
#include "laplace_gram.h"

namespace normalign {
namespace {

constexpr int64_t P = 48;  // csrc/cpu/point_panel.h

template <class T>
const LaplaceOf<T>& laplace() {
  const auto& table = NORMALIGN_SELECT(laplace_gram);
  if constexpr (sizeof(T) == 4)
    return table.f32;
  else
    return table.f64;
}

template <class T>
const CholeskyOf<T>& cholesky_table() {
  const auto& table = NORMALIGN_SELECT(cholesky);
  if constexpr (sizeof(T) == 4)
    return table.f32;
  else
    return table.f64;
}

void check_kernel(int kernel) {
  if (kernel < 0 || kernel > 2)
    throw std::invalid_argument("kernel must be 0, 1 or 2, got " + std::to_string(kernel));
}

template <class T>
void pack(int64_t n, int64_t width, Address x, int64_t ldx, double scale, Address out,
          int threads) {
  check_size("n", n);
  check_size("width", width);
  const T* xp = pointer<const T>("x", x, n * width);
  T* op = pointer<T>("out", out, n * width);
  py::gil_scoped_release release;
  laplace<T>().pack(n, width, xp, ldx, static_cast<T>(scale), op, threads);
}

template <class T>
void gram(int kernel, double exponent, bool weights, int64_t m, int64_t n, int64_t width, Address x,
          Address z, Address out, int64_t ldo, int threads) {
  check_kernel(kernel);
  check_size("m", m);
  check_size("n", n);
  check_size("ldo", ldo, n);
  const T* xp = pointer<const T>("x", x, m * width);
  const T* zp = pointer<const T>("z", z, n * width);
  T* op = pointer<T>("out", out, m * n);
  py::gil_scoped_release release;
  laplace<T>().gram(kernel, static_cast<T>(exponent), weights, m, n, width, xp, zp, op, ldo,
                    threads);
}

template <class T>
void gram_packed(int kernel, double exponent, int64_t n, int64_t width, Address x, Address ridge,
                 double shift, Address packed, int threads) {
  check_kernel(kernel);
  check_size("n", n);
  const T* xp = pointer<const T>("x", x, n * width);
  const T* rp = reinterpret_cast<const T*>(ridge);  // none where null
  T* op = pointer<T>("packed", packed, n);
  py::gil_scoped_release release;
  laplace<T>().gram_packed(kernel, static_cast<T>(exponent), n, width, xp, rp,
                           static_cast<T>(shift), op, threads);
}

template <class T>
void matvec(int kernel, double exponent, int64_t m, int64_t n, int64_t c, int64_t width, Address x,
            Address z, Address coef, int64_t ldc, Address out, int64_t ldo, Address workspace,
            int threads) {
  check_kernel(kernel);
  check_size("c", c);
  check_size("ldc", ldc, c);
  check_size("ldo", ldo, c);
  const T* xp = pointer<const T>("x", x, m * width);
  const T* zp = pointer<const T>("z", z, n * width);
  const T* cp = pointer<const T>("coef", coef, n * c);
  T* op = pointer<T>("out", out, m * c);
  T* wp = pointer<T>("workspace", workspace, c);
  py::gil_scoped_release release;
  laplace<T>().matvec(kernel, static_cast<T>(exponent), m, n, c, width, xp, zp, cp, ldc, op, ldo,
                      wp, threads);
}

template <class T>
void matvec_symmetric(int kernel, double exponent, int64_t n, int64_t c, int64_t width, Address x,
                      Address coef, Address out, int64_t stride, Address workspace, int threads) {
  check_kernel(kernel);
  check_size("c", c);
  check_size("stride", stride, c);
  const T* xp = pointer<const T>("x", x, n * width);
  const T* cp = pointer<const T>("coef", coef, n * c);
  T* op = pointer<T>("out", out, n * c);
  T* wp = pointer<T>("workspace", workspace, n * c);
  py::gil_scoped_release release;
  laplace<T>().matvec_symmetric(kernel, static_cast<T>(exponent), n, c, width, xp, cp, op, stride,
                                wp, threads);
}

template <class T>
void pack_lower(int64_t n, Address a, int64_t lda, double shift, Address packed, int threads) {
  check_size("n", n);
  check_size("lda", lda, n);
  const T* ap = pointer<const T>("a", a, n);
  T* lp = pointer<T>("packed", packed, n);
  py::gil_scoped_release release;
  cholesky_table<T>().pack(n, ap, lda, static_cast<T>(shift), lp, threads);
}

template <class T>
py::tuple factor(int64_t n, Address packed, Address inverse, int threads) {
  check_size("n", n);
  T* lp = pointer<T>("packed", packed, n);
  T* ip = pointer<T>("inverse", inverse, n);
  T pivots[2] = {T(0), T(0)};
  int64_t failed = 0;
  {
    py::gil_scoped_release release;
    failed = cholesky_table<T>().factor(n, lp, ip, pivots, threads);
  }
  return py::make_tuple(failed, static_cast<double>(pivots[0]), static_cast<double>(pivots[1]));
}

template <class T>
void solve(int64_t n, int64_t c, Address packed, Address inverse, Address rhs, int64_t stride) {
  check_size("n", n);
  check_size("c", c);
  check_size("stride", stride, c);
  const T* lp = pointer<const T>("packed", packed, n);
  const T* ip = pointer<const T>("inverse", inverse, n);
  T* rp = pointer<T>("rhs", rhs, n * c);
  py::gil_scoped_release release;
  cholesky_table<T>().solve(n, c, lp, ip, rp, stride);
}

template <class T>
void bind(py::module_& m, const std::string& suffix) {
  m.def(("laplace_pack" + suffix).c_str(), &pack<T>);
  m.def(("laplace_gram" + suffix).c_str(), &gram<T>);
  m.def(("laplace_gram_packed" + suffix).c_str(), &gram_packed<T>);
  m.def(("laplace_matvec" + suffix).c_str(), &matvec<T>);
  m.def(("laplace_matvec_symmetric" + suffix).c_str(), &matvec_symmetric<T>);
  m.def(("cholesky_pack" + suffix).c_str(), &pack_lower<T>);
  m.def(("cholesky_factor" + suffix).c_str(), &factor<T>);
  m.def(("cholesky_solve" + suffix).c_str(), &solve<T>);
}

}  // namespace

void bind_laplace_gram(py::module_& m) {
  m.attr("panel") = P;
  bind<float>(m, "_f32");
  bind<double>(m, "_f64");
}

}  // namespace normalign
