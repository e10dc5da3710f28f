// Activations with their first and second derivatives, on whole vectors.
#pragma once
#include "grokalign_stack.h"
#include "vecmath.h"

namespace normalign {
namespace {

template <class T>
struct ActivationConstants;

// erfcx(x) (1 + 1.7 x), x >= 0, as a polynomial in s, where t = (x - k) / (x + k) in [-1, tmax] is
// mapped to s in [-1, 1]; and tanh(x) / x for x^2 <= 0.36 in s = 2 x^2 / 0.36 - 1. Both interpolate
// at Chebyshev nodes: relative error 9e-10 and 3e-17 for erfcx, 8e-8 and 4e-15 for tanh.
template <>
struct ActivationConstants<float> {
  static constexpr float k = 2.5f, tmax = 0.655172414f, limit = 12.f;
  static constexpr float erfcx[] = {1.132232406f,    -0.1089863941f,   -0.08351501186f,
                                    0.1016896337f,   -0.04887077746f,  0.009520553849f,
                                    0.001564321815f, -9.669995382e-4f, -7.797955017e-5f,
                                    9.028048609e-5f, 7.206933713e-6f,  -6.909812868e-6f};
  static constexpr float tanh[] = {0.944026654f, -0.05221975107f, 0.003498408684f, -2.388737772e-4f,
                                   1.623847637e-5f};
};

template <>
struct ActivationConstants<double> {
  static constexpr double k = 3.0, tmax = 0.80645161290322580645, limit = 28.;
  static constexpr double erfcx[] = {
      1.10767710995358864,     -0.145149965689648319,   -0.028272219270939935,
      0.0944813593712678114,   -0.0797115998261204982,  0.0397495917691629966,
      -0.0112109537733852159,  4.28173601167669358e-4,  9.02907036194724381e-4,
      -2.10740020888622084e-4, -6.67905323370833421e-5, 2.90954211244777751e-5,
      6.66387282695768774e-6,  -3.61048507599688085e-6, -9.78280783830726626e-7,
      4.22650879883534325e-7,  1.75510781781718894e-7,  -4.12564796221412191e-8,
      -3.10745370356887063e-8, 2.34495808815112051e-9,  4.4932429570440107e-9,
      2.39385750870686391e-11, -3.7812454397161933e-10};
  static constexpr double tanh[] = {
      0.94402665395787579,  -0.0522200960833972649, 0.00349843214190698327, -2.37495308277413384e-4,
      1.61447540842234e-5,  -1.09767879749476e-6,   7.46287979615701e-8,    -5.07410070837453e-9,
      3.49027947031091e-10, -2.37308318000484e-11};
};

template <class V>
NORMALIGN_INLINE V absolute(V x) {
  return x < V{} ? -x : x;
}

// The normal distribution function and its density.
template <class T, class V = typename Simd<T>::V>
NORMALIGN_INLINE void normal(V z, V* distribution, V* density) {
  using C = ActivationConstants<T>;
  const V gauss = vexp<T>(T(-0.5) * z * z);
  V x = absolute(z) * T(0.70710678118654752440);
  x = at_most(x, splat(C::limit));  // exp(-x^2) is 0 from here on
  const V t = (x - C::k) / (x + C::k);
  const V s = (t + 1) * (T(2) / (C::tmax + 1)) - 1;
  const V tail = T(0.5) * gauss * polynomial<T>(s, C::erfcx) / (1 + T(1.7) * x);
  *distribution = z < V{} ? tail : 1 - tail;
  *density = gauss * T(0.39894228040143267794);
}

template <class T, class V = typename Simd<T>::V>
NORMALIGN_INLINE V logistic(V z) {
  const V e = vexp<T>(-absolute(z));  // at most 1: no overflow at either end
  const V p = 1 / (1 + e);
  return z < V{} ? e * p : p;
}

template <class T, class V = typename Simd<T>::V>
NORMALIGN_INLINE V hyperbolic_tangent(V z) {
  using C = ActivationConstants<T>;
  const V x = absolute(z), square = z * z;
  const V e = vexp<T>(-2 * x);
  const V large = (1 - e) / (1 + e);
  const V small = z * polynomial<T>(square * T(2 / 0.36) - 1, C::tanh);
  return square < splat(T(0.36)) ? small : (z < V{} ? -large : large);
}

// Reads z from d1; writes a = phi(z), d1 = phi'(z) and, where it is not constant, d2 = phi''(z).
template <class T, class F>
NORMALIGN_INLINE void activate_with(int64_t n, T* d1, T* a, T* d2, F f) {
  using V = typename Simd<T>::V;
  for (int64_t i = 0; i < n; i += Simd<T>::width) {
    V value, slope, bend{};
    f(load(d1 + i), &value, &slope, &bend);
    store(a + i, value);
    store(d1 + i, slope);
    if (d2) store(d2 + i, bend);
  }
}

// n is a multiple of the vector width.
template <class T>
void activate(Activation kind, double p0, double p1, int64_t n, T* d1, T* a, T* d2) {
  using V = typename Simd<T>::V;
  const T u = static_cast<T>(p0), w = static_cast<T>(p1);
  switch (kind) {
    case Activation::identity:
    case Activation::relu: break;  // in the products' epilogue
    case Activation::leaky_relu:
      activate_with(n, d1, a, d2, [u](V z, V* value, V* slope, V*) {
        *slope = z > V{} ? splat(T(1)) : splat(u);
        *value = z > V{} ? z : z * u;
      });
      break;
    case Activation::square:
      activate_with(n, d1, a, d2, [](V z, V* value, V* slope, V* bend) {
        *value = z * z;
        *slope = 2 * z;
        *bend = splat(T(2));
      });
      break;
    case Activation::gelu:
      activate_with(n, d1, a, d2, [](V z, V* value, V* slope, V* bend) {
        V distribution, density;
        normal<T>(z, &distribution, &density);
        *value = z * distribution;
        *slope = distribution + z * density;
        *bend = density * (2 - z * z);
      });
      break;
    case Activation::gelu_tanh:
      activate_with(n, d1, a, d2, [](V z, V* value, V* slope, V* bend) {
        const T k = T(0.79788456080286535588), m = T(0.044715);
        const V square = z * z;
        const V inner = k * z * (1 + m * square), inner1 = k * (1 + 3 * m * square);
        const V t = hyperbolic_tangent<T>(inner), s = 1 - t * t;
        *value = T(0.5) * z * (1 + t);
        *slope = T(0.5) * (1 + t + z * s * inner1);
        *bend = s * (inner1 + T(0.5) * z * (6 * k * m * z - 2 * t * inner1 * inner1));
      });
      break;
    case Activation::silu:
      activate_with(n, d1, a, d2, [](V z, V* value, V* slope, V* bend) {
        const V p = logistic<T>(z), q = logistic<T>(-z);
        *value = z * p;
        *slope = p * (1 + z * q);
        *bend = p * q * (2 + z * (q - p));
      });
      break;
    case Activation::tanh:
      activate_with(n, d1, a, d2, [](V z, V* value, V* slope, V* bend) {
        *value = hyperbolic_tangent<T>(z);
        *slope = 1 - *value * *value;
        *bend = -2 * *value * *slope;
      });
      break;
    case Activation::sigmoid:
      activate_with(n, d1, a, d2, [](V z, V* value, V* slope, V* bend) {
        const V q = logistic<T>(-z);
        *value = logistic<T>(z);
        *slope = *value * q;
        *bend = *slope * (q - *value);
      });
      break;
    case Activation::softplus:  // log(1 + exp(beta z)) / beta; z itself where beta z > threshold
      for (int64_t i = 0; i < n; ++i) {
        const T z = d1[i], bz = u * z;
        const bool linear = bz > w;
        const T e = static_cast<T>(__builtin_exp(static_cast<double>(bz < 0 ? bz : -bz)));
        const T p = bz < 0 ? e / (1 + e) : 1 / (1 + e);
        const T soft = (bz > 0 ? bz : 0) + static_cast<T>(__builtin_log1p(static_cast<double>(e)));
        a[i] = linear ? z : (bz != bz ? bz : soft / u);
        d1[i] = linear ? T(1) : p;
        if (d2) d2[i] = linear ? T(0) : u * p * (1 - p);
      }
      break;
  }
}

}  // namespace
}  // namespace normalign
