// Activations with their first and second derivatives, element by element.
#pragma once
#include "../grokalign_stack.h"
#include "portable.cuh"

namespace normalign {
namespace {

template <class T>
struct Activated {
  T value, slope, bend;
};

inline bool is_curved_gpu(Activation kind) {
  return kind != Activation::identity && kind != Activation::relu && kind != Activation::leaky_relu;
}

template <class T>
__device__ __forceinline__ T logistic(T z) {
  const T e = exp(z < T(0) ? z : -z);  // at most 1: no overflow at either end
  return (z < T(0) ? e : T(1)) / (T(1) + e);
}

// NaN passes through each of them, as in torch.
template <class T>
__device__ __forceinline__ Activated<T> activated(Activation kind, T p0, T p1, T z) {
  switch (kind) {
    case Activation::relu: return {z <= T(0) ? T(0) : z, z <= T(0) ? T(0) : T(1), T(0)};
    case Activation::leaky_relu: return {z > T(0) ? z : z * p0, z > T(0) ? T(1) : p0, T(0)};
    case Activation::square: return {z * z, T(2) * z, T(2)};
    case Activation::gelu: {
      const T distribution = T(0.5) * erfc(z * T(-0.70710678118654752440));
      const T density = T(0.39894228040143267794) * exp(T(-0.5) * z * z);
      return {z * distribution, distribution + z * density, density * (T(2) - z * z)};
    }
    case Activation::gelu_tanh: {
      const T k = T(0.79788456080286535588), m = T(0.044715);
      const T inner = k * z * (T(1) + m * z * z), inner1 = k * (T(1) + T(3) * m * z * z);
      const T t = tanh(inner), s = T(1) - t * t;
      return {T(0.5) * z * (T(1) + t), T(0.5) * (T(1) + t + z * s * inner1),
              s * (inner1 + T(0.5) * z * (T(6) * k * m * z - T(2) * t * inner1 * inner1))};
    }
    case Activation::silu: {
      const T p = logistic(z), q = logistic(-z);
      return {z * p, p * (T(1) + z * q), p * q * (T(2) + z * (q - p))};
    }
    case Activation::tanh: {
      const T t = tanh(z), s = T(1) - t * t;
      return {t, s, T(-2) * t * s};
    }
    case Activation::sigmoid: {
      const T p = logistic(z), q = logistic(-z);
      return {p, p * q, p * q * (q - p)};
    }
    case Activation::softplus: {  // log(1 + exp(beta z)) / beta; z itself where beta z > threshold
      const T bz = p0 * z;
      if (bz > p1) return {z, T(1), T(0)};
      const T p = logistic(bz);
      const T soft = (bz > T(0) ? bz : T(0)) + log1p(exp(bz > T(0) ? -bz : bz));
      return {bz != bz ? bz : soft / p0, p, p0 * p * (T(1) - p)};
    }
    default: return {z, T(1), T(0)};
  }
}

}  // namespace
}  // namespace normalign
