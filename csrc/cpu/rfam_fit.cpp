#include "rfam_fit.h"

#include "cholesky.h"
#include "laplace_gram.h"
#include "point_panel.h"
#include "rfam_attack.h"

namespace normalign {
namespace {

// The kernels of this file's instruction set.
template <class T>
struct Kernels;
template <>
struct Kernels<float> {
  static constexpr const auto& laplace = NORMALIGN_VARIANT(laplace_gram).f32;
  static constexpr const auto& cholesky = NORMALIGN_VARIANT(cholesky).f32;
  static constexpr const auto& points = NORMALIGN_VARIANT(rfam_attack).f32;
};
template <>
struct Kernels<double> {
  static constexpr const auto& laplace = NORMALIGN_VARIANT(laplace_gram).f64;
  static constexpr const auto& cholesky = NORMALIGN_VARIANT(cholesky).f64;
  static constexpr const auto& points = NORMALIGN_VARIANT(rfam_attack).f64;
};

// Hands out the parts of a workspace.
struct Parts {
  char* next;
  template <class T>
  T* take(int64_t count) {
    T* part = reinterpret_cast<T*>(next);
    next += rfam_aligned(count * static_cast<int64_t>(sizeof(T)));
    return part;
  }
};

NORMALIGN_INLINE int64_t row_length(int64_t c) {
  return (c + 15) / 16 * 16;
}

// The unit of rounding, twice.
template <class T>
constexpr double unit = sizeof(T) == 4 ? 1.1920928955078125e-7 : 2.220446049250313e-16;

// Whether float32 can't hold the coefficients.
NORMALIGN_INLINE bool is_hard(int64_t n, double least_pivot, const Float32Rules& rules) {
  return unit<float> * double(n) >= rules.hard * least_pivot && least_pivot < rules.near;
}

template <class T>
T largest_size(int64_t count, const T* values) {
  constexpr int64_t W = Simd<T>::width;
  typename Simd<T>::V top{};
  for (int64_t e = 0; e < count; e += W) {
    const auto v = load_n(values + e, count - e);
    const auto size = v < 0 ? -v : v;
    top = size > top ? size : top;
  }
  T lanes[W], largest = T(0);
  store(lanes, top);
  for (int64_t l = 0; l < W; ++l) largest = lanes[l] > largest ? lanes[l] : largest;
  return largest;
}

// `from` (n, c), contiguous, into rows of `stride`; what fills them is 0.
template <class From, class To>
void pad_rows(int64_t n, int64_t c, const From* from, int64_t rows, int64_t stride, To* to) {
  for (int64_t e = 0; e < rows * stride; ++e) to[e] = To(0);
  for (int64_t i = 0; i < n; ++i)
    for (int64_t k = 0; k < c; ++k) to[i * stride + k] = static_cast<To>(from[i * c + k]);
}

template <class From, class To>
void unpad_rows(int64_t n, int64_t c, const From* from, int64_t stride, To* to) {
  for (int64_t i = 0; i < n; ++i)
    for (int64_t k = 0; k < c; ++k) to[i * c + k] = static_cast<To>(from[i * stride + k]);
}

// Projected points (n, r) into panels of float64.
void widen(const KernelSystem<float>& s, const float* u, double* panels) {
  for (int64_t p = 0; p < panels_of(s.n); ++p) {
    const int64_t rows = least(P, s.n - p * P);
    for (int64_t k = 0; k < s.r; ++k) {
      double* to = panels + (p * s.r + k) * P;
      for (int64_t l = 0; l < rows; ++l) to[l] = s.scale * double(u[(p * P + l) * s.r + k]);
      for (int64_t l = rows; l < P; ++l) to[l] = 0;
    }
  }
}

// reg / weight into `place`; null without weights.
template <class T, class To>
const To* ridge_of(const KernelSystem<T>& s, To* place) {
  if (!s.weight) return nullptr;
  for (int64_t i = 0; i < s.n; ++i) place[i] = static_cast<To>(s.reg / double(s.weight[i]));
  return place;
}

// The factor of K + diag(ridge), or of K + reg I where ridge is null.
template <class T, class From>
bool factor_system(const KernelSystem<From>& s, const T* panels, const T* ridge, T* packed,
                   T* inverse, T* pivots, int threads) {
  Kernels<T>::laplace.gram_packed(s.kernel, static_cast<T>(s.exponent), s.n, s.r, panels, ridge,
                                  ridge ? T(0) : static_cast<T>(s.reg), packed, threads);
  if (Kernels<T>::cholesky.factor(s.n, packed, inverse, pivots, threads)) return false;
  // A pivot within rounding of the products that it is left over from means nothing.
  return pivots[0] > unit<T> * pivots[1];
}

// What corrections in float64 work in.
struct Corrections {
  double *panels, *coef, *product, *own;
};

// Adds corrections by residuals in float64 to the solution in `rhs`. Each is a factor smaller than
// the one before (the solution itself, relative to which they are measured); so is what it leaves.
bool correct(const KernelSystem<float>& s, const float* u, const float* packed,
             const float* inverse, float* rhs, const Corrections& work, int threads) {
  constexpr double goal = 1e-6;
  constexpr int most = 12;
  const int64_t rows = panels_of(s.n) * P, stride = row_length(s.c);
  widen(s, u, work.panels);
  for (int64_t e = 0; e < rows * stride; ++e) work.coef[e] = rhs[e];
  double before = 1;
  for (int round = 0; round < most; ++round) {
    Kernels<double>::laplace.matvec_symmetric(s.kernel, s.exponent, s.n, s.c, s.r, work.panels,
                                              work.coef, work.product, stride, work.own, threads);
    for (int64_t i = 0; i < s.n; ++i) {
      const double ridge = s.weight ? s.reg / double(s.weight[i]) : s.reg;
      for (int64_t k = 0; k < s.c; ++k) {
        const int64_t e = i * stride + k;
        rhs[e] = static_cast<float>(s.y[i * s.c + k] - work.product[e] - ridge * work.coef[e]);
      }
    }
    Kernels<float>::cholesky.solve(s.n, s.c, packed, inverse, rhs, stride);
    for (int64_t e = 0; e < rows * stride; ++e) work.coef[e] += rhs[e];
    const double top = largest_size(rows * stride, work.coef);
    const double size = largest_size(rows * stride, rhs) / (top > 1e-300 ? top : 1e-300);
    if (size * size <= goal * before) return true;
    if (!(size < 0.5 * before)) return false;
    before = size;
    for (int64_t e = 0; e < rows * stride; ++e) rhs[e] = 0.f;
  }
  return false;
}

// The whole solution in float64.
Solved solve_few(const KernelSystem<float>& s, const Float32Rules& rules, const float* u,
                 float* coef, Parts parts, int threads) {
  const int64_t rows = panels_of(s.n) * P, stride = row_length(s.c);
  double* packed = parts.take<double>(rows * (rows + P) / 2 + rows);
  double *inverse = packed + rows * (rows + P) / 2, *ridge = parts.take<double>(rows);
  double *panels = parts.take<double>(rows * s.r), *rhs = parts.take<double>(rows * stride);
  double pivots[2];
  widen(s, u, panels);
  if (!factor_system(s, panels, ridge_of(s, ridge), packed, inverse, pivots, threads))
    return Solved::failed;
  if (is_hard(s.n, pivots[0], rules)) return Solved::wide;
  pad_rows(s.n, s.c, s.y, rows, stride, rhs);
  Kernels<double>::cholesky.solve(s.n, s.c, packed, inverse, rhs, stride);
  unpad_rows(s.n, s.c, rhs, stride, coef);
  return Solved::done;
}

template <class T>
Solved solve_coef(const KernelSystem<T>& s, const Float32Rules& rules, bool refine, T* u, T* panels,
                  T* coef, T* pivots, void* workspace, int threads) {
  constexpr bool single = sizeof(T) == 4;
  const int64_t rows = panels_of(s.n) * P, stride = row_length(s.c);
  Parts parts{static_cast<char*>(workspace)};
  T* packed = parts.take<T>(rows * (rows + P) / 2 + rows);
  T* inverse = packed + rows * (rows + P) / 2;
  T* factor = parts.take<T>(s.d * s.r + s.d);
  T* lanes = parts.take<T>(threads * P * (s.d + s.r));
  T* ridge = parts.take<T>(rows);
  T* rhs = parts.take<T>(rows * stride);

  for (int64_t e = 0; e < s.d * s.r; ++e) factor[e] = static_cast<T>(s.factor[e]);
  Kernels<T>::points.project(s.n, s.d, s.r, s.x, s.ldx, s.mean, factor, u, lanes, threads);
  if (single && !(largest_size(s.n * s.r, u) * s.scale <= rules.wide)) return Solved::wide;
  Kernels<T>::laplace.pack(s.n, s.r, u, s.r, static_cast<T>(s.scale), panels, threads);
  if constexpr (single) {
    // No pivot is below reg.
    const bool may_err = s.weight || !(unit<T> * double(s.n) < rules.stand * s.reg);
    if (refine && may_err && s.n <= few_points) return solve_few(s, rules, u, coef, parts, threads);
  }
  if (!factor_system(s, panels, ridge_of(s, ridge), packed, inverse, pivots, threads))
    return Solved::failed;
  if (single && is_hard(s.n, pivots[0], rules)) return Solved::hard;
  pad_rows(s.n, s.c, s.y, rows, stride, rhs);
  Kernels<T>::cholesky.solve(s.n, s.c, packed, inverse, rhs, stride);
  if constexpr (single) {
    if (refine && unit<T> * double(s.n) / pivots[0] >= rules.stand) {
      Corrections work;
      work.panels = parts.take<double>(rows * s.r);
      work.coef = parts.take<double>(rows * stride);
      work.product = parts.take<double>(rows * stride);
      work.own = parts.take<double>(threads * (rows * stride + P * s.c));
      if (!correct(s, u, packed, inverse, rhs, work, threads)) return Solved::hard;
      unpad_rows(s.n, s.c, work.coef, stride, coef);
      return Solved::done;
    }
  }
  unpad_rows(s.n, s.c, rhs, stride, coef);
  return Solved::done;
}

template <class T>
Solved solve(const KernelSystem<T>& s, const Float32Rules& rules, bool refine, T* u, T* panels,
             T* coef, T* pivots, T* largest, void* workspace, int threads) {
  const Solved status = solve_coef(s, rules, refine, u, panels, coef, pivots, workspace, threads);
  if (status == Solved::done) *largest = largest_size(s.n * s.c, coef);
  return status;
}

template <class T>
void predict(const KernelSystem<T>& s, int64_t m, const T* x, int64_t ldx, const T* z_panels,
             const T* coef, T* out, void* workspace, int threads) {
  const int64_t rows = panels_of(m) * P;
  Parts parts{static_cast<char*>(workspace)};
  T* factor = parts.take<T>(s.d * s.r);
  T* lanes = parts.take<T>(threads * P * (s.d + s.r));
  T* u = parts.take<T>(rows * s.r);
  T* panels = parts.take<T>(rows * s.r);
  T* sums = parts.take<T>(threads * P * s.c);
  for (int64_t e = 0; e < s.d * s.r; ++e) factor[e] = static_cast<T>(s.factor[e]);
  Kernels<T>::points.project(m, s.d, s.r, x, ldx, s.mean, factor, u, lanes, threads);
  Kernels<T>::laplace.pack(m, s.r, u, s.r, static_cast<T>(s.scale), panels, threads);
  Kernels<T>::laplace.matvec(s.kernel, static_cast<T>(s.exponent), m, s.n, s.c, s.r, panels,
                             z_panels, coef, s.c, out, s.c, sums, threads);
}

// --- the factor of M, in float64: small matrices that decide every later digit

// Lower triangle in place, zeros above; false where a pivot is not above `least`.
bool cholesky_small(int64_t n, double* a, double least) {
  for (int64_t j = 0; j < n; ++j) {
    const double pivot = a[j * n + j];
    if (!(pivot > least)) return false;
    const double root = __builtin_sqrt(pivot), inverse = 1 / root;
    a[j * n + j] = root;
    for (int64_t i = j + 1; i < n; ++i) {
      a[i * n + j] *= inverse;
      a[j * n + i] = a[i * n + j];  // row j: column j of the factor, contiguous
    }
    for (int64_t i = j + 1; i < n; ++i) {
      const double x = a[j * n + i];
      for (int64_t k = j + 1; k <= i; ++k) a[i * n + k] -= x * a[j * n + k];
    }
    for (int64_t i = j + 1; i < n; ++i) a[j * n + i] = 0;
  }
  return true;
}

// |A^T B|^2 in the Frobenius norm of a, b (d, r).
double squared_product(int64_t d, int64_t r, const double* a, const double* b, double* product) {
  for (int64_t e = 0; e < r * r; ++e) product[e] = 0;
  for (int64_t t = 0; t < d; ++t)
    for (int64_t i = 0; i < r; ++i) {
      const double x = a[t * r + i];
      for (int64_t j = 0; j < r; ++j) product[i * r + j] += x * b[t * r + j];
    }
  double sum = 0;
  for (int64_t e = 0; e < r * r; ++e) sum += product[e] * product[e];
  return sum;
}

bool next_factor(int64_t d, int64_t r, const double* factor, const double* agop, double tolerance,
                 double* next, double* change, double* workspace) {
  double *lower = workspace, *product = workspace + r * r, top = 0;
  for (int64_t e = 0; e < r * r; ++e) lower[e] = agop[e];
  for (int64_t i = 0; i < r; ++i) top = agop[i * r + i] > top ? agop[i * r + i] : top;
  if (!(top > 0) || !cholesky_small(r, lower, tolerance * top)) return false;
  for (int64_t e = 0; e < d * r; ++e) next[e] = 0;
  for (int64_t t = 0; t < d; ++t)
    for (int64_t k = 0; k < r; ++k) {
      const double x = factor[t * r + k];
      for (int64_t j = 0; j <= k; ++j) next[t * r + j] += x * lower[k * r + j];
    }
  const double largest = largest_size(d * r, next);
  if (!(largest > 0) || !(largest < __builtin_inf())) return false;
  double squares = 0;  // of entries of size 1: neither overflows nor vanishes
  for (int64_t e = 0; e < d * r; ++e) squares += (next[e] / largest) * (next[e] / largest);
  const double scale = __builtin_sqrt(double(d) / squares);
  for (int64_t e = 0; e < d * r; ++e) next[e] = next[e] / largest * scale;
  const double after = squared_product(d, r, next, next, product);
  const double before = squared_product(d, r, factor, factor, product);
  const double moved = after + before - 2 * squared_product(d, r, factor, next, product);
  *change = moved > 0 ? __builtin_sqrt(moved / after) : 0;
  return true;
}

}  // namespace

extern const RfamFitTable NORMALIGN_VARIANT(rfam_fit) = {
    {solve<float>, predict<float>}, {solve<double>, predict<double>}, next_factor};

}  // namespace normalign
