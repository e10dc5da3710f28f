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

// K = 2^-t with t = sqrt(s), W = K / t, and W = 0 at s = 0.
#if defined(__AVX512F__)
// Division and square root are slow in 512 bits: Newton steps on the reciprocal root instead.
// Squares are clamped (above 1e30 the kernel is 0 anyway), so that no product overflows; max and
// min return their second argument where it is NaN.
NORMALIGN_INLINE void laplace_of(Simd<float>::V s, Simd<float>::V* k, Simd<float>::V* w) {
  const __mmask16 apart = _mm512_cmp_ps_mask(s, _mm512_setzero_ps(), _CMP_NEQ_UQ);
  Simd<float>::V c = _mm512_maskz_max_ps(0xffff, _mm512_set1_ps(1e-30f), s);
  c = _mm512_maskz_min_ps(0xffff, _mm512_set1_ps(1e30f), c);
  Simd<float>::V y = _mm512_maskz_rsqrt14_ps(0xffff, c);
  y = y * (1.5f - (0.5f * c * y) * y);
  Simd<float>::V t = c * y;
  t = _mm512_maskz_mov_ps(apart, t + 0.5f * y * (c - t * t));
  const Simd<float>::V n = round_even(t), r = n - t;
  *k = scale2(1 + r * polynomial<float>(r, ExpConstants<float>::exp2), -n);
  *w = _mm512_maskz_mul_ps(apart, *k, y);
}
NORMALIGN_INLINE void laplace_of(Simd<double>::V s, Simd<double>::V* k, Simd<double>::V* w) {
  const __mmask8 apart = _mm512_cmp_pd_mask(s, _mm512_setzero_pd(), _CMP_NEQ_UQ);
  Simd<double>::V c = _mm512_maskz_max_pd(0xff, _mm512_set1_pd(1e-300), s);
  c = _mm512_maskz_min_pd(0xff, _mm512_set1_pd(1e30), c);
  Simd<double>::V y = _mm512_maskz_rsqrt14_pd(0xff, c);
  y = y * (1.5 - (0.5 * c * y) * y);
  y = y * (1.5 - (0.5 * c * y) * y);
  Simd<double>::V t = c * y;
  t = _mm512_maskz_mov_pd(apart, t + 0.5 * y * (c - t * t));
  const Simd<double>::V n = round_even(t), r = n - t;
  *k = scale2(1 + r * polynomial<double>(r, ExpConstants<double>::exp2), -n);
  *w = _mm512_maskz_mul_pd(apart, *k, y);
}
#else
template <class V>
NORMALIGN_INLINE void laplace_of(V s, V* k, V* w) {
  const V t = vsqrt(s);
  *k = vexp2<decltype(+s[0])>(-t);
  *w = s == 0 ? V{} : *k / t;
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

template <class T, Kernel kernel, class V = typename Simd<T>::V>
NORMALIGN_INLINE void pair_values(V s, T exponent, V* k, V* w) {
  if (kernel == Kernel::laplace) laplace_of(s, k, w);
  if (kernel == Kernel::gaussian) {
    *k = vexp2<T>(-s);
    *w = s == 0 ? V{} : *k;
  }
  if (kernel == Kernel::power) power_of<T>(s, exponent, k, w);
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
  for (int i = 0; i < M; ++i) NORMALIGN_UNROLL
  for (int v = 0; v < N; ++v) {
    V k, w;
    pair_values<T, kernel>(sum[i][v], exponent, &k, &w);
    if (want_k) store(k_out + i * P + v * W, k);
    if (want_w) store(w_out + i * P + v * W, w);
  }
}

template <class T, Kernel kernel, bool want_k, bool want_w>
void pair_tile_of(int64_t width, const T* lanes, const T* columns, int64_t count, T exponent, T* k,
                  T* w) {
#if defined(__AVX512F__)
  constexpr int M = 8, N = 3;
#else
  constexpr int M = 4, N = 2;  // one register less than the product needs is free here
#endif
  for (int64_t l = 0; l < P; l += N * Simd<T>::width) {
    for (int64_t j = 0; j < count; j += M)  // P is a multiple of M, and panels are whole
      pair_block<T, M, N, kernel, want_k, want_w>(width, lanes + l, columns + j, exponent,
                                                  want_k ? k + j * P + l : nullptr,
                                                  want_w ? w + j * P + l : nullptr);
  }
}

// K and W of one panel against the first `count` points of another, rounded up to
// whole register blocks; null where not wanted.
template <class T>
void pair_tile(Kernel kernel, int64_t width, const T* lanes, const T* columns, int64_t count,
               T exponent, T* k, T* w) {
#define NORMALIGN_PAIR_TILE(kind)                                                               \
  if (kernel == Kernel::kind) {                                                                 \
    if (k && w)                                                                                 \
      pair_tile_of<T, Kernel::kind, true, true>(width, lanes, columns, count, exponent, k, w);  \
    else if (k)                                                                                 \
      pair_tile_of<T, Kernel::kind, true, false>(width, lanes, columns, count, exponent, k, w); \
    else                                                                                        \
      pair_tile_of<T, Kernel::kind, false, true>(width, lanes, columns, count, exponent, k, w); \
  }
  NORMALIGN_PAIR_TILE(laplace)
  NORMALIGN_PAIR_TILE(gaussian)
  NORMALIGN_PAIR_TILE(power)
#undef NORMALIGN_PAIR_TILE
}

}  // namespace
}  // namespace normalign
