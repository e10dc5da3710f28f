// See attack.h. A block takes some points of one machine through all iterations, with their kernel
// values and gradient weights against every training point in shared memory. A warp owns each
// point: its loss, its step, and what was best so far.
#pragma once
#include "attack.h"
#include "kernel_value.cuh"

namespace normalign {
namespace {

constexpr int attack_threads = 256;
constexpr int attack_warps = attack_threads / 32;

__host__ __device__ __forceinline__ int larger(int a, int b) {
  return a > b ? a : b;
}

// Arrays of a block in shared memory, one row for each point.
template <class T>
struct AttackRows {
  T *current, *gradient, *u, *g, *outputs, *cotangent, *values, *weights, *partial;
};

__host__ __device__ __forceinline__ int64_t attack_row_elements(int n, int c, int d, int r) {
  return 2 * (int64_t(n) + c + d + r) + larger(attack_warps, larger(c, r));
}

template <class T, int rows>
__device__ __forceinline__ AttackRows<T> attack_rows(T* memory, int n, int c, int d, int r) {
  AttackRows<T> at;
  at.current = memory;
  at.gradient = at.current + rows * d;
  at.u = at.gradient + rows * d;
  at.g = at.u + rows * r;
  at.outputs = at.g + rows * r;
  at.cotangent = at.outputs + rows * c;
  at.values = at.cotangent + rows * c;
  at.weights = at.values + rows * n;
  at.partial = at.weights + rows * n;
  return at;
}

// out (rows, count) = sum_j left_j (right_qj - origin_q), where `origin` (rows, count) may be null.
// A warp has a column q and all rows, so that neighbouring lanes read neighbouring entries of
// `right`, each once; where columns are few, several warps share one.
template <class T, int rows>
__device__ __forceinline__ void row_sums(const T* left, int n, int count,
                                         const T* __restrict__ right, const T* origin, T* partial,
                                         T* out) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int parts = count >= attack_warps ? 1 : attack_warps / count;
  for (int task = warp; task < count * parts; task += attack_warps) {
    const int q = task / parts, part = task % parts;
    T sum[rows] = {}, from[rows] = {};
    if (origin) {
      NORMALIGN_UNROLL
      for (int i = 0; i < rows; ++i) from[i] = origin[i * count + q];
    }
    for (int j = part * 32 + lane; j < n; j += 32 * parts) {
      const T value = right[int64_t(q) * n + j];
      NORMALIGN_UNROLL
      for (int i = 0; i < rows; ++i) sum[i] += left[i * n + j] * (value - from[i]);
    }
    NORMALIGN_UNROLL
    for (int i = 0; i < rows; ++i) {
      const T total = warp_sum(sum[i]);
      if (lane == 0) partial[task * rows + i] = total;
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < rows * count; e += attack_threads) {
    const int i = e / count, q = e % count;
    T sum = T(0);
    for (int part = 0; part < parts; ++part) sum += partial[(q * parts + part) * rows + i];
    out[e] = sum;
  }
  __syncthreads();
}

template <class T>
struct Largest {
  T value;
  int index;
};

// The largest of `values`, the first one on ties, over all but index `without`; the same in every
// lane. The index is `count` where there is none.
template <class T>
__device__ __forceinline__ Largest<T> warp_largest(const T* values, int count, int without) {
  Largest<T> best{-T(INFINITY), count};
  for (int k = threadIdx.x % 32; k < count; k += 32)
    if (k != without && (values[k] > best.value || best.index == count)) best = {values[k], k};
  NORMALIGN_UNROLL
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const T value = __shfl_xor_sync(0xffffffffu, best.value, lanes);
    const int index = __shfl_xor_sync(0xffffffffu, best.index, lanes);
    if (index < count &&
        (best.index == count || value > best.value || (value == best.value && index < best.index)))
      best = {value, index};
  }
  return best;
}

// The loss of one point from its outputs f, by a warp; its gradient in f, up to a positive factor.
template <class T>
__device__ __forceinline__ T warp_loss(Loss loss, int c, const T* f, const T* target, int label,
                                       T* cotangent) {
  const int lane = threadIdx.x % 32;
  if (loss == Loss::mse) {
    T sum = T(0);
    for (int k = lane; k < c; k += 32) {
      const T residual = f[k] - target[k];
      cotangent[k] = residual;
      sum += residual * residual;
    }
    return warp_sum(sum);
  }
  if (loss == Loss::margin) {
    const Largest<T> other = warp_largest(f, c, label);
    for (int k = lane; k < c; k += 32)
      cotangent[k] = other.index == c ? T(0) : T(k == other.index) - T(k == label);
    return other.value - f[label];
  }
  const T top = warp_largest(f, c, -1).value;
  T sum = T(0);
  for (int k = lane; k < c; k += 32) sum += exp(f[k] - top);
  sum = warp_sum(sum);
  for (int k = lane; k < c; k += 32) cotangent[k] = exp(f[k] - top) / sum - T(k == label);
  return top + log(sum) - f[label];
}

// One step of a point from `current` along g, by a warp.
template <class T>
__device__ __forceinline__ void warp_step(const GpuAttack<T>& k, const T* eps, const T* step,
                                          const T* x, const T* g, T* current) {
  const int lane = threadIdx.x % 32;
  T size = T(0), shrink = T(1);
  if (k.l2) {
    // Divided by the largest entry first: squares of tiny gradients would underflow.
    T most = T(0), sum = T(0);
    NORMALIGN_LOOP
    for (int t = lane; t < k.d; t += 32) most = fmax(most, fabs(eps[t] * g[t]));
    NORMALIGN_UNROLL
    for (int lanes = 16; lanes > 0; lanes /= 2)
      most = fmax(most, __shfl_xor_sync(0xffffffffu, most, lanes));
    if (most > T(0)) {
      NORMALIGN_LOOP
      for (int t = lane; t < k.d; t += 32) {
        const T part = eps[t] * g[t] / most;
        sum += part * part;
      }
      size = T(1) / sqrt(warp_sum(sum));
    }
    T length = T(0);
    NORMALIGN_LOOP
    for (int t = lane; t < k.d; t += 32) {
      const T direction = most > T(0) ? eps[t] * g[t] / most * size : T(0);
      const T move = current[t] + step[t] * direction - x[t];
      current[t] = move;
      const T z = eps[t] > T(0) ? move / eps[t] : T(0);
      length += z * z;
    }
    length = sqrt(warp_sum(length));
    if (length > T(1)) shrink = T(1) / length;
  }
  NORMALIGN_LOOP
  for (int t = lane; t < k.d; t += 32) {
    T move;
    if (k.l2) {
      move = eps[t] > T(0) ? current[t] * shrink : T(0);
    } else {
      move = current[t] + step[t] * (T(g[t] > T(0)) - T(g[t] < T(0))) - x[t];
      move = move < -eps[t] ? -eps[t] : move > eps[t] ? eps[t] : move;
    }
    T to = x[t] + move;
    if (k.lower) to = to < k.lower[t] ? k.lower[t] : to;
    if (k.upper) to = to > k.upper[t] ? k.upper[t] : to;
    current[t] = to;
  }
}

template <class T, int rows>
__global__ void __launch_bounds__(attack_threads, sizeof(T) == 4 ? 2 : 1)
    attack_kernel(const GpuAttack<T> k) {
  static_assert(rows <= attack_warps, "a warp for each row");
  NORMALIGN_DYNAMIC_SHARED(T, memory);
  const int n = k.n, c = k.c, d = k.d, r = k.r;
  const AttackRows<T> at = attack_rows<T, rows>(memory, n, c, d, r);
  const int lane = threadIdx.x % 32, own = threadIdx.x / 32;
  const int machine = blockIdx.y / k.radii, radius = blockIdx.y % k.radii;
  const int64_t row0 = int64_t(blockIdx.x) * rows;  // among the m points
  const int64_t valid = k.m - row0 < rows ? k.m - row0 : rows;
  const int64_t first = int64_t(blockIdx.y) * k.m + row0;  // among all results
  const T* const z = k.z + int64_t(machine) * r * n;
  const T* const coef = k.coef + int64_t(machine) * c * n;
  const double* const mean = k.mean + int64_t(machine) * d;
  const double* const factor = k.factor + int64_t(machine) * d * r;
  const T* const back = k.back + int64_t(machine) * r * d;
  const bool owner = own < valid;  // this warp has a point
  const int64_t point = int64_t(machine) * k.m + row0 + own;
  const T* const target = k.targets + point * c;

  for (int e = threadIdx.x; e < rows * d; e += attack_threads)
    at.current[e] = e / d < valid ? k.points[first * d + e] : T(0);
  const int label = owner ? warp_largest(target, c, -1).index : 0;
  T best = -T(INFINITY);
  int64_t zero = 0;
  __syncthreads();
  for (int iteration = 0;; ++iteration) {
    const bool last = iteration == k.iterations;
    // Into factor space as the training points were: float64, rounded once. A point that stands on
    // a training point then has distance 0, where the kernel has no gradient.
    NORMALIGN_LOOP
    for (int e = threadIdx.x; e < rows * r; e += attack_threads) {
      const int i = e / r, t = e % r;
      double sum = 0;
      for (int q = 0; q < d; ++q)
        sum = add_rounded(sum, multiply_rounded(double(at.current[i * d + q]) - mean[q],
                                                factor[int64_t(q) * r + t]));
      at.u[e] = T(sum);
    }
    __syncthreads();
    for (int j = threadIdx.x; j < n; j += attack_threads) {
      T squared[rows] = {};
      for (int t = 0; t < r; ++t) {
        const T value = z[int64_t(t) * n + j];
        NORMALIGN_UNROLL
        for (int i = 0; i < rows; ++i) {
          const T difference = at.u[i * r + t] - value;
          squared[i] += difference * difference;
        }
      }
      NORMALIGN_UNROLL
      for (int i = 0; i < rows; ++i) at.values[i * n + j] = squared[i];
      // A loop, because copies of the exponential would fill the registers.
      NORMALIGN_LOOP
      for (int i = 0; i < rows; ++i)
        kernel_pair(k.kernel, at.values[i * n + j], at.values[i * n + j], at.weights[i * n + j]);
    }
    __syncthreads();
    row_sums<T, rows>(at.values, n, c, coef, nullptr, at.partial, at.outputs);
    if (owner) {
      const T* const f = at.outputs + own * c;
      T reached = warp_loss(k.loss, c, f, target, label, at.cotangent + own * c);
      if (k.select == Select::margin && k.loss != Loss::margin)
        reached = warp_largest(f, c, label).value - f[label];
      const bool better = k.select == Select::last ? last : reached > best;
      if (better) best = reached;
      if (better || iteration == 0) {
        NORMALIGN_LOOP
        for (int t = lane; t < d; t += 32)
          k.points[(first + own) * d + t] = at.current[own * d + t];
        NORMALIGN_LOOP
        for (int q = lane; q < c; q += 32) k.outputs[(first + own) * c + q] = f[q];
      }
    } else if (own < rows) {
      for (int q = lane; q < c; q += 32) at.cotangent[own * c + q] = T(0);
    }
    __syncthreads();
    if (last) break;
    for (int j = threadIdx.x; j < n; j += attack_threads) {
      T sum[rows] = {};
      for (int q = 0; q < c; ++q) {
        const T value = coef[int64_t(q) * n + j];
        NORMALIGN_UNROLL
        for (int i = 0; i < rows; ++i) sum[i] += at.cotangent[i * c + q] * value;
      }
      NORMALIGN_UNROLL
      for (int i = 0; i < rows; ++i) at.weights[i * n + j] *= sum[i];
    }
    __syncthreads();
    if (r > 0) row_sums<T, rows>(at.weights, n, r, z, at.u, at.partial, at.g);
    NORMALIGN_LOOP
    for (int e = threadIdx.x; e < rows * d; e += attack_threads) {
      const int i = e / d, q = e % d;
      T sum = T(0);
      for (int t = 0; t < r; ++t) sum += back[int64_t(t) * d + q] * at.g[i * r + t];
      at.gradient[e] = sum;
    }
    __syncthreads();
    if (owner) {
      const T* const g = at.gradient + own * d;
      T moved = T(0);
      for (int t = lane; t < d; t += 32) moved += T(g[t] != T(0));
      zero += warp_sum(moved) == T(0);
      warp_step(k, k.eps + int64_t(radius) * d, k.step + int64_t(radius) * d, k.x + point * d, g,
                at.current + own * d);
    }
    __syncthreads();
  }
  if (owner && lane == 0) {
    k.value[first + own] = best;
    k.zero[first + own] = zero;
  }
}

}  // namespace
}  // namespace normalign
