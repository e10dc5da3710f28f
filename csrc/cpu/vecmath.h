// Elementary functions on simd.h's vectors, without fast-math: NaN stays NaN, denormal results are
// produced, overflow gives infinity, exp(-inf) is 0. Within 2 units in the last place, unless said.
#pragma once
#include "simd.h"

#if defined(__SSE2__) && !defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace normalign {
namespace {

// Comparisons with NaN are false, so NaN passes through both.
template <class V>
NORMALIGN_INLINE V at_least(V x, V low) {
  return x < low ? low : x;
}
template <class V>
NORMALIGN_INLINE V at_most(V x, V high) {
  return x > high ? high : x;
}

// The zero-masked forms of the AVX-512 intrinsics cost nothing more, and spare a false warning.
#if defined(__AVX512F__)
NORMALIGN_INLINE Simd<float>::V vsqrt(Simd<float>::V x) {
  return _mm512_maskz_sqrt_ps(0xffff, x);
}
NORMALIGN_INLINE Simd<double>::V vsqrt(Simd<double>::V x) {
  return _mm512_maskz_sqrt_pd(0xff, x);
}
#elif defined(__AVX2__)
NORMALIGN_INLINE Simd<float>::V vsqrt(Simd<float>::V x) {
  return _mm256_sqrt_ps(x);
}
NORMALIGN_INLINE Simd<double>::V vsqrt(Simd<double>::V x) {
  return _mm256_sqrt_pd(x);
}
#elif defined(__SSE2__)
NORMALIGN_INLINE Simd<float>::V vsqrt(Simd<float>::V x) {
  return _mm_sqrt_ps(x);
}
NORMALIGN_INLINE Simd<double>::V vsqrt(Simd<double>::V x) {
  return _mm_sqrt_pd(x);
}
#else
template <class V>
NORMALIGN_INLINE V vsqrt(V x) {
  for (unsigned i = 0; i < sizeof(V) / sizeof(x[0]); ++i) x[i] = __builtin_sqrt(x[i]);
  return x;
}
#endif

// The constants of one precision. Polynomials interpolate at Chebyshev nodes, and stay within a
// fifth of a unit in the last place.
template <class T>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  // Beyond these exp is 0 or infinity; exp2 likewise.
  static constexpr float low = -104.f, high = 89.f, low2 = -150.5f, high2 = 128.5f;
  static constexpr float round = 12582912.f;  // 1.5 * 2^23: adding it leaves the nearest integer
  static constexpr float log2e = 1.44269504f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
  static constexpr int mantissa = 23, bias = 127, half = 512;
  // (exp(r) - 1 - r) / r^2 on [-ln2/2, ln2/2], and (2^r - 1) / r on [-1/2, 1/2]
  static constexpr float exp[] = {0.5f, 0.16666576f, 0.041666552f, 0.008363233f, 0.001392625f};
  static constexpr float exp2[] = {0.6931472f,   0.2402265f,    0.05550357f,
                                   0.009618082f, 0.0013390979f, 0.00015453262f};
};

template <>
struct ExpConstants<double> {
  static constexpr double low = -746., high = 710., low2 = -1075.5, high2 = 1024.5;
  static constexpr double round = 6755399441055744.;  // 1.5 * 2^52
  static constexpr double log2e = 1.4426950408889634, ln2_high = 0.693145751953125,
                          ln2_low = 1.42860682030941723212e-6;
  static constexpr int mantissa = 52, bias = 1023, half = 4096;
  static constexpr double exp[] = {0.5,
                                   0.16666666666666669,
                                   0.041666666666623824,
                                   0.008333333333330039,
                                   0.0013888888917367081,
                                   0.00019841269863171557,
                                   2.4801521057868204e-05,
                                   2.7557268276905696e-06,
                                   2.7620201591031547e-07,
                                   2.5100472505694996e-08};
  static constexpr double exp2[] = {
      0.6931471805599453,     0.24022650695910097,   0.0555041086648216,    0.009618129107606715,
      0.0013333558146416842,  0.0001540353044202707, 1.525273382999124e-05, 1.3215442410711872e-06,
      1.0178062351388103e-07, 7.072621356539349e-09, 4.4549794711760616e-10};
};

// c[0] + c[1] x + ...
template <class T, int N>
NORMALIGN_INLINE typename Simd<T>::V polynomial(typename Simd<T>::V x, const T (&c)[N]) {
  typename Simd<T>::V p = splat(c[N - 1]);
  NORMALIGN_UNROLL
  for (int i = N - 2; i >= 0; --i) p = p * x + c[i];
  return p;
}

// p * 2^n for an integral n within the exponents of the type, rounded once.
#if defined(__AVX512F__)
NORMALIGN_INLINE Simd<float>::V round_even(Simd<float>::V x) {
  return _mm512_maskz_roundscale_ps(0xffff, x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
NORMALIGN_INLINE Simd<double>::V round_even(Simd<double>::V x) {
  return _mm512_maskz_roundscale_pd(0xff, x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
NORMALIGN_INLINE Simd<float>::V scale2(Simd<float>::V p, Simd<float>::V n) {
  return _mm512_maskz_scalef_ps(0xffff, p, n);
}
NORMALIGN_INLINE Simd<double>::V scale2(Simd<double>::V p, Simd<double>::V n) {
  return _mm512_maskz_scalef_pd(0xff, p, n);
}
#else
template <class V>
NORMALIGN_INLINE V round_even(V x) {
  using C = ExpConstants<decltype(+x[0])>;
  return (x + C::round) - C::round;
}
template <class V>
NORMALIGN_INLINE V scale2(V p, V n) {
  using T = decltype(+p[0]);
  using C = ExpConstants<T>;
  using I = typename Simd<T>::I;
  // In two factors, since 2^n itself may be out of range. NaN makes factors of garbage, and stays.
  const I k = reinterpret_cast<I>(n + C::round) - reinterpret_cast<I>(splat(C::round));
  // Shifted as a non-negative number: there is no arithmetic shift of 64-bit lanes before AVX-512.
  const I first = ((k + 2 * C::half) >> 1) - C::half, second = k - first;
  return p * reinterpret_cast<V>((first + C::bias) << C::mantissa) *
         reinterpret_cast<V>((second + C::bias) << C::mantissa);
}
#endif

template <class T, class V = typename Simd<T>::V>
NORMALIGN_INLINE V vexp(V x) {
  using C = ExpConstants<T>;
  x = at_most(at_least(x, splat(C::low)), splat(C::high));
  const V n = round_even(x * C::log2e);
  const V r = (x - n * C::ln2_high) - n * C::ln2_low;
  return scale2(1 + (r + r * r * polynomial<T>(r, C::exp)), n);
}

template <class T, class V = typename Simd<T>::V>
NORMALIGN_INLINE V vexp2(V x) {
  using C = ExpConstants<T>;
  x = at_most(at_least(x, splat(C::low2)), splat(C::high2));
  const V n = round_even(x);
  const V r = x - n;
  return scale2(1 + r * polynomial<T>(r, C::exp2), n);
}

// Within 4 units in the last place; -infinity at 0, NaN below.
template <class T, class V = typename Simd<T>::V>
NORMALIGN_INLINE V vlog2(V x) {
  using C = ExpConstants<T>;
  using I = typename Simd<T>::I;
  constexpr T smallest = sizeof(T) == 4 ? T(1.17549435e-38) : T(2.2250738585072014e-308);
  constexpr T lift = T(1ll << (C::mantissa + 1));
  const V normal = x < smallest ? x * lift : x;
  const I bits = reinterpret_cast<I>(normal), one = reinterpret_cast<I>(splat(T(1)));
  // The exponent as a number: its bits behind those of 1.5 * 2^mantissa. x < 0 is dealt with below.
  V n = reinterpret_cast<V>(((bits >> C::mantissa) - C::bias) +
                            reinterpret_cast<I>(splat(C::round))) -
        C::round;
  V m = reinterpret_cast<V>((bits & (((I{} + 1) << C::mantissa) - 1)) | one);
  const V upper = m > T(1.4142135623730951) ? splat(T(1)) : V{};
  m = upper > 0 ? T(0.5) * m : m;
  n = n + upper - (x < smallest ? splat(T(C::mantissa + 1)) : V{});
  // log2(m) = 2 / ln(2) * (z + z^3 / 3 + ...) with z = (m - 1) / (m + 1), |z| < 0.172
  const V z = (m - 1) / (m + 1), square = z * z;
  V p{};
  NORMALIGN_UNROLL
  for (int k = sizeof(T) == 4 ? 4 : 10; k > 0; --k) p = (p + T(1) / T(2 * k + 1)) * square;
  const V half = z * T(2 * 1.4426950408889634);
  V r = n + (half + half * p);
  r = x == 0 ? splat(-T(__builtin_inf())) : r;
  r = x < 0 ? splat(T(__builtin_nan(""))) : r;
  return x < splat(T(__builtin_inf())) ? r : x;  // infinity and NaN
}

}  // namespace
}  // namespace normalign
