// K and the gradient weight W of one squared distance.
#pragma once
#include "laplace.h"
#include "portable.cuh"

namespace normalign {
namespace {

template <class T>
__device__ __forceinline__ T kernel_value(GpuKernel<T> k, T squared) {
  if (k.exponent == T(2)) return exp(-squared * k.inverse * k.inverse);
  const T t = sqrt(squared) * k.inverse;
  return exp(k.exponent == T(1) ? -t : -pow(t, k.exponent));
}

// W as in the reference: 0 at distance 0, where a Laplace kernel has no gradient. The square of t
// may leave the range of T, and t itself where K is 0.
template <class T>
__device__ __forceinline__ T kernel_weight(GpuKernel<T> k, T squared) {
  if (squared == T(0)) return T(0);
  const T scale = k.exponent * k.inverse * k.inverse;
  if (k.exponent == T(2)) return scale * exp(-squared * k.inverse * k.inverse);
  const T t = sqrt(squared) * k.inverse;
  if (k.exponent == T(1)) return scale * exp(-t) / t;
  const T power = pow(t, k.exponent), value = exp(-power);
  return value == T(0) ? T(0) : scale * (power / t / t) * value;
}

// Both at once, with one exponential.
template <class T>
__device__ __forceinline__ void kernel_pair(GpuKernel<T> k, T squared, T& value, T& weight) {
  const T scale = k.exponent * k.inverse * k.inverse;
  if (k.exponent == T(2)) {
    value = exp(-squared * k.inverse * k.inverse);
    weight = squared == T(0) ? T(0) : scale * value;
    return;
  }
  const T t = sqrt(squared) * k.inverse;
  const T power = k.exponent == T(1) ? t : pow(t, k.exponent);
  value = exp(-power);
  weight = squared == T(0) || value == T(0)
               ? T(0)
               : scale * (k.exponent == T(1) ? value / t : power / t / t * value);
}

}  // namespace
}  // namespace normalign
