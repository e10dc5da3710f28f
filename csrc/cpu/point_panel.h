// Points in panels, and the two register tiles that all kernels of RFAM are made of.
//
// A panel holds P points, coordinate by coordinate: panel[k * P + i] is coordinate k of point i.
// A pair tile holds values of P points ("lanes") against up to P others ("columns"):
// tile[j * P + i]. Both are what multiply() reads and writes with vectors along i.
#pragma once
#include "simd.h"
#include "vecmath.h"

namespace normalign {
namespace {

constexpr int P = 48;  // a multiple of every vector width, three vectors of the widest

template <class T>
struct Tiling {
  static constexpr int W = Simd<T>::width;
#if defined(__AVX512F__)
  static constexpr int M = 8;  // 8 x 3 accumulators of 32 registers
#else
  static constexpr int M = 4;  // 4 x 3 of 16
#endif
  static constexpr int N = 3;
  static constexpr int lanes = N * W;
};

NORMALIGN_INLINE int64_t panels_of(int64_t n) {
  return (n + P - 1) / P;
}
NORMALIGN_INLINE int64_t least(int64_t a, int64_t b) {
  return a < b ? a : b;
}
NORMALIGN_INLINE int64_t most(int64_t a, int64_t b) {
  return a > b ? a : b;
}
template <class T>
int64_t padded(int64_t n) {  // to whole vectors
  return (n + Tiling<T>::W - 1) / Tiling<T>::W * Tiling<T>::W;
}

enum class Store { set, add, subtract };

// c[i][v] (=, +=, -=) sum_k a[i * ai + k * ak] b[k][v] for M rows and N vectors.
template <class T, int M, int N, Store mode>
__attribute__((noinline)) void multiply_tile(int64_t depth, const T* a, int64_t ai, int64_t ak,
                                             const T* b, int64_t ldb, T* c, int64_t ldc) {
  using V = typename Simd<T>::V;
  constexpr int W = Simd<T>::width;
  V sum[M][N];
  NORMALIGN_UNROLL
  for (int i = 0; i < M; ++i) NORMALIGN_UNROLL
  for (int v = 0; v < N; ++v) sum[i][v] = V{};
  for (int64_t k = 0; k < depth; ++k) {
    V row[N];
    NORMALIGN_UNROLL
    for (int v = 0; v < N; ++v) row[v] = load(b + v * W);
    NORMALIGN_UNROLL
    for (int i = 0; i < M; ++i) {
      const V x = splat(a[i * ai]);
      NORMALIGN_UNROLL
      for (int v = 0; v < N; ++v) sum[i][v] += x * row[v];
    }
    a += ak;
    b += ldb;
  }
  NORMALIGN_UNROLL
  for (int i = 0; i < M; ++i) NORMALIGN_UNROLL
  for (int v = 0; v < N; ++v) {
    T* at = c + i * ldc + v * W;
    if (mode == Store::set) store(at, sum[i][v]);
    if (mode == Store::add) store(at, load(at) + sum[i][v]);
    if (mode == Store::subtract) store(at, load(at) - sum[i][v]);
  }
}

template <class T, int N, Store mode>
void multiply_rows(int64_t rows, int64_t depth, const T* a, int64_t ai, int64_t ak, const T* b,
                   int64_t ldb, T* c, int64_t ldc) {
  constexpr int M = Tiling<T>::M;
  int64_t i = 0;
  for (; i + M <= rows; i += M)
    multiply_tile<T, M, N, mode>(depth, a + i * ai, ai, ak, b, ldb, c + i * ldc, ldc);
  // What is left in at most two passes over b.
  if (M > 4 && i + 4 <= rows) {
    multiply_tile<T, 4, N, mode>(depth, a + i * ai, ai, ak, b, ldb, c + i * ldc, ldc);
    i += 4;
  }
  if (rows - i == 3)
    multiply_tile<T, 3, N, mode>(depth, a + i * ai, ai, ak, b, ldb, c + i * ldc, ldc);
  if (rows - i == 2)
    multiply_tile<T, 2, N, mode>(depth, a + i * ai, ai, ak, b, ldb, c + i * ldc, ldc);
  if (rows - i == 1)
    multiply_tile<T, 1, N, mode>(depth, a + i * ai, ai, ak, b, ldb, c + i * ldc, ldc);
}

// c (rows x cols) (=, +=, -=) a b with a[i * ai + k * ak]; cols is rounded up to whole vectors,
// so b and c are padded to that.
template <class T, Store mode>
void multiply(int64_t rows, int64_t cols, int64_t depth, const T* a, int64_t ai, int64_t ak,
              const T* b, int64_t ldb, T* c, int64_t ldc) {
  constexpr int W = Tiling<T>::W;
  int64_t vectors = (cols + W - 1) / W;
  while (vectors > 0) {
    // 4 vectors are better served as 2 + 2 than as 3 + 1.
    const int n = vectors == 4 ? 2 : vectors > 3 ? 3 : static_cast<int>(vectors);
    if (n == 3) multiply_rows<T, 3, mode>(rows, depth, a, ai, ak, b, ldb, c, ldc);
    if (n == 2) multiply_rows<T, 2, mode>(rows, depth, a, ai, ak, b, ldb, c, ldc);
    if (n == 1) multiply_rows<T, 1, mode>(rows, depth, a, ai, ak, b, ldb, c, ldc);
    b += n * W;
    c += n * W;
    vectors -= n;
  }
}

// Points x scale into panels; the points that fill the last panel are zero.
template <class T>
void pack_panel(int64_t n, int64_t width, const T* x, int64_t ldx, T scale, T* panel) {
  for (int64_t k = 0; k < width; ++k) {
    for (int64_t i = 0; i < n; ++i) panel[k * P + i] = x[i * ldx + k] * scale;
    for (int64_t i = n; i < P; ++i) panel[k * P + i] = T(0);
  }
}

// --- values of pairs

// The kernel exp(-(D / L)^q). With coordinates scaled by kernel_scale, s the squared distance of
// scaled coordinates, K and W below need no further constant; the gradient weight -K'(D) / D is
// W times kernel_weight_scale.
enum class Kernel { laplace = 0, gaussian = 1, power = 2 };

constexpr double log2_of_e = 1.4426950408889634;

// Values come in groups of G vectors, and one operation is done for all of them before the next: a
// single vector would wait for its own results.
#define NORMALIGN_EACH NORMALIGN_UNROLL for (int i = 0; i < G; ++i)

// K = 2^-t with t = sqrt(s), W = K / t, and W = 0 at s = 0.
#if defined(__AVX512F__)
// Division and square root are slow in 512 bits: Newton steps on the reciprocal root instead.
// Squares are clamped (K is 0 well before), so that no product overflows; min returns its second
// argument where that is NaN.

// 2^(i / 16): t is rounded to sixteenths, and only what is left goes through a polynomial.
alignas(64) constexpr float exp2_sixteenths[16] = {
    1.f,        1.0442737f, 1.0905077f, 1.1387886f, 1.1892071f, 1.2418578f, 1.2968396f, 1.3542556f,
    1.4142135f, 1.4768262f, 1.5422108f, 1.6104903f, 1.6817929f, 1.7562522f, 1.8340081f, 1.9152066f};

template <int G>
NORMALIGN_INLINE void laplace_of(const Simd<float>::V (&s)[G], Simd<float>::V (&k)[G],
                                 Simd<float>::V (&w)[G]) {
  using V = Simd<float>::V;
  constexpr float round = 786432.f;  // 1.5 * 2^19: adding it leaves the nearest sixteenth
  const V table = load(exp2_sixteenths);
  V c[G], y[G], h[G], t[G], r[G], p[G], bits[G];
  NORMALIGN_EACH c[i] = _mm512_maskz_min_ps(0xffff, _mm512_set1_ps(65536.f), s[i]);
  NORMALIGN_EACH y[i] =
      _mm512_maskz_rsqrt14_ps(_mm512_cmp_ps_mask(s[i], _mm512_setzero_ps(), _CMP_NEQ_UQ), c[i]);
  NORMALIGN_EACH t[i] = c[i] * y[i];
  NORMALIGN_EACH h[i] = 0.5f * y[i];
  NORMALIGN_EACH r[i] = 0.5f - h[i] * t[i];
  NORMALIGN_EACH t[i] = t[i] + t[i] * r[i];
  NORMALIGN_EACH y[i] = y[i] + y[i] * r[i];
  NORMALIGN_EACH bits[i] = round - t[i];  // their last four: the sixteenths of -t
  NORMALIGN_EACH c[i] = bits[i] - round;
  NORMALIGN_EACH r[i] = t[i] + c[i];
  NORMALIGN_EACH bits[i] =
      _mm512_maskz_permutexvar_ps(0xffff, reinterpret_cast<__m512i>(bits[i]), table);
  NORMALIGN_EACH p[i] = r[i] * -0.055505086f + 0.24023356f;  // (2^-r - 1) / r, to 1e-8
  NORMALIGN_EACH p[i] = r[i] * (r[i] * p[i] + -0.6931472f);
  NORMALIGN_EACH p[i] = bits[i] * p[i] + bits[i];
  NORMALIGN_EACH k[i] = scale2(p[i], c[i]);  // by the integer below
  NORMALIGN_EACH w[i] = k[i] * y[i];
}
template <int G>
NORMALIGN_INLINE void laplace_of(const Simd<double>::V (&s)[G], Simd<double>::V (&k)[G],
                                 Simd<double>::V (&w)[G]) {
  using V = Simd<double>::V;
  V c[G], y[G], t[G], n[G], r[G];
  NORMALIGN_EACH c[i] = _mm512_maskz_min_pd(0xff, _mm512_set1_pd(1e30), s[i]);
  NORMALIGN_EACH y[i] =
      _mm512_maskz_rsqrt14_pd(_mm512_cmp_pd_mask(s[i], _mm512_setzero_pd(), _CMP_NEQ_UQ), c[i]);
  NORMALIGN_EACH y[i] = y[i] * (1.5 - (0.5 * c[i] * y[i]) * y[i]);
  NORMALIGN_EACH y[i] = y[i] * (1.5 - (0.5 * c[i] * y[i]) * y[i]);
  NORMALIGN_EACH t[i] = c[i] * y[i];
  NORMALIGN_EACH t[i] = t[i] + 0.5 * y[i] * (c[i] - t[i] * t[i]);
  NORMALIGN_EACH n[i] = round_even(t[i]);
  NORMALIGN_EACH r[i] = n[i] - t[i];
  NORMALIGN_EACH k[i] =
      scale2(1 + r[i] * polynomial<double>(r[i], ExpConstants<double>::exp2), -n[i]);
  NORMALIGN_EACH w[i] = k[i] * y[i];
}
#else
template <class V, int G>
NORMALIGN_INLINE void laplace_of(const V (&s)[G], V (&k)[G], V (&w)[G]) {
  NORMALIGN_EACH {
    const V t = vsqrt(s[i]);
    k[i] = vexp2<decltype(+s[i][0])>(-t);
    w[i] = s[i] == 0 ? V{} : k[i] / t;
  }
}
#endif

// K = 2^(-log2(e) p), W = K p / s with p = s^(q/2).
template <class T, class V = typename Simd<T>::V>
NORMALIGN_INLINE void power_of(V s, T exponent, V* k, V* w) {
  s = at_most(s, splat(T(1e30)));  // K is 0 well before
  const V p = s == 0 ? V{} : vexp2<T>(T(0.5) * exponent * vlog2<T>(s));
  *k = vexp2<T>(-T(log2_of_e) * p);
  *w = s == 0 ? V{} : *k * (p / s);
}

template <class T, Kernel kernel, int G, class V = typename Simd<T>::V>
NORMALIGN_INLINE void pair_values(const V (&s)[G], T exponent, V (&k)[G], V (&w)[G]) {
  if constexpr (kernel == Kernel::laplace) laplace_of(s, k, w);
  NORMALIGN_EACH {
    if (kernel == Kernel::gaussian) {
      k[i] = vexp2<T>(-s[i]);
      w[i] = s[i] == 0 ? V{} : k[i];
    }
    if (kernel == Kernel::power) power_of<T>(s[i], exponent, &k[i], &w[i]);
  }
}

// Squared distances as sums of squared differences: exactly 0 for equal points, and no digits are
// lost where two points are near each other.
template <class T, int M, int N, Kernel kernel, bool want_k, bool want_w>
__attribute__((noinline)) void pair_block(int64_t width, const T* lanes, const T* columns,
                                          T exponent, T* k_out, T* w_out) {
  using V = typename Simd<T>::V;
  constexpr int W = Simd<T>::width;
  V sum[M][N];
  NORMALIGN_UNROLL
  for (int i = 0; i < M; ++i) NORMALIGN_UNROLL
  for (int v = 0; v < N; ++v) sum[i][v] = V{};
  for (int64_t k = 0; k < width; ++k) {
    V row[N];
    NORMALIGN_UNROLL
    for (int v = 0; v < N; ++v) row[v] = load(lanes + v * W);
    NORMALIGN_UNROLL
    for (int i = 0; i < M; ++i) {
      const V x = splat(columns[i]);
      NORMALIGN_UNROLL
      for (int v = 0; v < N; ++v) {
        const V delta = row[v] - x;
        sum[i][v] += delta * delta;
      }
    }
    lanes += P;
    columns += P;
  }
  NORMALIGN_UNROLL
  for (int i = 0; i < M; ++i) {
    V k[N], w[N];
    pair_values<T, kernel>(sum[i], exponent, k, w);
    NORMALIGN_UNROLL
    for (int v = 0; v < N; ++v) {
      if (want_k) store(k_out + i * P + v * W, k[v]);
      if (want_w) store(w_out + i * P + v * W, w[v]);
    }
  }
}

template <class T, int N, Kernel kernel, bool want_k, bool want_w>
void pair_columns(int64_t width, const T* lanes, const T* columns, int64_t count, T exponent, T* k,
                  T* w) {
  constexpr int M = Tiling<T>::M;
  for (int64_t j = 0; j < count; j += M)  // P is a multiple of M, and panels are whole
    pair_block<T, M, N, kernel, want_k, want_w>(width, lanes, columns + j, exponent,
                                                want_k ? k + j * P : nullptr,
                                                want_w ? w + j * P : nullptr);
}

template <class T, Kernel kernel, bool want_k, bool want_w>
void pair_tile_of(int64_t width, const T* lanes, const T* columns, int64_t count, T exponent, T* k,
                  T* w, int64_t lane_count) {
  constexpr int W = Simd<T>::width;
#if defined(__AVX512F__)
  constexpr int N = 3;
#else
  constexpr int N = 2;  // one register less than the product needs is free here
#endif
  for (int64_t l = 0; l < lane_count;) {
    const int64_t left = (lane_count - l + W - 1) / W;
    T *kl = want_k ? k + l : nullptr, *wl = want_w ? w + l : nullptr;
    if (left >= N && (N < 3 || left != 4)) {
      pair_columns<T, N, kernel, want_k, want_w>(width, lanes + l, columns, count, exponent, kl,
                                                 wl);
      l += N * W;
    } else if (left >= 2) {
      pair_columns<T, 2, kernel, want_k, want_w>(width, lanes + l, columns, count, exponent, kl,
                                                 wl);
      l += 2 * W;
    } else {
      pair_columns<T, 1, kernel, want_k, want_w>(width, lanes + l, columns, count, exponent, kl,
                                                 wl);
      l += W;
    }
  }
}

// K and W of the first `lane_count` points of one panel, rounded up to whole vectors, against the
// first `count` points of another, rounded up to whole register blocks; null where not wanted.
template <class T>
void pair_tile(Kernel kernel, int64_t width, const T* lanes, const T* columns, int64_t count,
               T exponent, T* k, T* w, int64_t lane_count = P) {
#define NORMALIGN_PAIR_TILE(kind)                                                              \
  if (kernel == Kernel::kind) {                                                                \
    if (k && w)                                                                                \
      pair_tile_of<T, Kernel::kind, true, true>(width, lanes, columns, count, exponent, k, w,  \
                                                lane_count);                                   \
    else if (k)                                                                                \
      pair_tile_of<T, Kernel::kind, true, false>(width, lanes, columns, count, exponent, k, w, \
                                                 lane_count);                                  \
    else                                                                                       \
      pair_tile_of<T, Kernel::kind, false, true>(width, lanes, columns, count, exponent, k, w, \
                                                 lane_count);                                  \
  }
  NORMALIGN_PAIR_TILE(laplace)
  NORMALIGN_PAIR_TILE(gaussian)
  NORMALIGN_PAIR_TILE(power)
#undef NORMALIGN_PAIR_TILE
}

#undef NORMALIGN_EACH

}  // namespace
}  // namespace normalign
