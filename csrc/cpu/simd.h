// One vector type for every instruction set, through the compiler's vector extensions: a * b + c
// becomes an FMA where there is one. Everything has internal linkage, because each instruction set
// compiles this file anew and the linker must not merge the copies.
#pragma once
#include <cstdint>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define NORMALIGN_INLINE static inline __attribute__((always_inline))
#define NORMALIGN_UNROLL _Pragma("GCC unroll 16")

namespace normalign {
namespace {

template <class T>
struct Simd;

template <>
struct Simd<float> {
  static constexpr int width = NORMALIGN_VECTOR_BYTES / 4;
  typedef float V __attribute__((vector_size(NORMALIGN_VECTOR_BYTES)));
  typedef float U __attribute__((vector_size(NORMALIGN_VECTOR_BYTES), aligned(4), may_alias));
  typedef int32_t I __attribute__((vector_size(NORMALIGN_VECTOR_BYTES)));
};

template <>
struct Simd<double> {
  static constexpr int width = NORMALIGN_VECTOR_BYTES / 8;
  typedef double V __attribute__((vector_size(NORMALIGN_VECTOR_BYTES)));
  typedef double U __attribute__((vector_size(NORMALIGN_VECTOR_BYTES), aligned(8), may_alias));
  typedef int64_t I __attribute__((vector_size(NORMALIGN_VECTOR_BYTES)));
};

template <class T>
NORMALIGN_INLINE typename Simd<T>::V load(const T* p) {
  return *reinterpret_cast<const typename Simd<T>::U*>(p);
}

template <class T>
NORMALIGN_INLINE void store(T* p, typename Simd<T>::V v) {
  *reinterpret_cast<typename Simd<T>::U*>(p) = v;
}

template <class T>
NORMALIGN_INLINE typename Simd<T>::V splat(T x) {
  return x - typename Simd<T>::V{};  // 0 + x would lose the sign of zero
}

// The first n lanes of p, zeros after them; reads nothing past p + n.
// store_n writes the first n lanes.
#if defined(__AVX512F__)
NORMALIGN_INLINE uint32_t lane_mask(int64_t n, int width) {
  return n >= width ? ~0u : n <= 0 ? 0u : (1u << n) - 1u;
}
NORMALIGN_INLINE Simd<float>::V load_n(const float* p, int64_t n) {
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>(lane_mask(n, 16)), p);
}
NORMALIGN_INLINE Simd<double>::V load_n(const double* p, int64_t n) {
  return _mm512_maskz_loadu_pd(static_cast<__mmask8>(lane_mask(n, 8)), p);
}
NORMALIGN_INLINE void store_n(float* p, Simd<float>::V v, int64_t n) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>(lane_mask(n, 16)), v);
}
NORMALIGN_INLINE void store_n(double* p, Simd<double>::V v, int64_t n) {
  _mm512_mask_storeu_pd(p, static_cast<__mmask8>(lane_mask(n, 8)), v);
}
#else
template <class T>
NORMALIGN_INLINE typename Simd<T>::V load_n(const T* p, int64_t n) {
  if (n >= Simd<T>::width) return load(p);
  T lanes[Simd<T>::width] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}
template <class T>
NORMALIGN_INLINE void store_n(T* p, typename Simd<T>::V v, int64_t n) {
  if (n >= Simd<T>::width) {
    store(p, v);
    return;
  }
  T lanes[Simd<T>::width];
  store(lanes, v);
  for (int64_t i = 0; i < n; ++i) p[i] = lanes[i];
}
#endif

// Sum of the lanes, in halves: a fixed order, so results do not depend on the compiler.
template <class T>
NORMALIGN_INLINE T lane_sum(typename Simd<T>::V v) {
  T lanes[Simd<T>::width];
  store(lanes, v);
  NORMALIGN_UNROLL
  for (int half = Simd<T>::width / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

}  // namespace
}  // namespace normalign
