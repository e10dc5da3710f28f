// See cholesky.h. A matrix that is definite in working precision, which is the rule, takes the
// blocked factorisation. Where a pivot is lost in rounding, its column would be wrong by the root
// of that, so the matrix is taken up again with complete pivoting: of the rows that are left the
// one with the greatest diagonal entry comes next, and once that is rounding so is all that is
// left.
#pragma once
#include "cholesky.cuh"

namespace normalign {
namespace {

// The greatest of the threads' values and its place, the lower one on ties; -1 where none has one.
template <class T>
__device__ __forceinline__ void block_greatest(CholeskyShared<T>& shared, T& value, int& place) {
  const auto take = [&](T other, int at) {
    if (at < 0 || (place >= 0 && (other < value || (other == value && at > place)))) return;
    value = other;
    place = at;
  };
  NORMALIGN_UNROLL
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const T other = __shfl_xor_sync(0xffffffffu, value, lanes);
    take(other, __shfl_xor_sync(0xffffffffu, place, lanes));
  }
  if (threadIdx.x % 32 == 0) {
    shared.inverse[threadIdx.x / 32] = value;
    shared.place[threadIdx.x / 32] = place;
  }
  __syncthreads();
  for (int w = 0; w < cholesky_threads / 32; ++w) take(shared.inverse[w], shared.place[w]);
  __syncthreads();
}

template <class T>
struct Square {
  int64_t n, stride;
  T* at;
  __device__ __forceinline__ T& operator()(int64_t i, int64_t j) const {
    return at[i * stride + j];
  }
};

// Columns of C, which is 0 to begin with, one a step; a thread has every 256th row. What is left of
// R's diagonal stands in its place, -infinity in rows that have been pivots. Returns the rank.
template <class T>
__device__ __forceinline__ int factor_pivoted(CholeskyShared<T>& shared, Square<T> r, Square<T> c) {
  T floor = T(0);
  NORMALIGN_LOOP
  for (int k = 0; k < r.n; ++k) {
    T pivot = T(0);
    int at = -1;
    for (int i = threadIdx.x; i < r.n; i += cholesky_threads) {
      if (!(r(i, i) > pivot)) continue;
      pivot = r(i, i);
      at = i;
    }
    block_greatest(shared, pivot, at);
    // The rounding of a diagonal entry that as many products as R has columns are taken from.
    if (k == 0) floor = T(r.n) * epsilon<T> * pivot;
    if (at < 0 || !(pivot > floor)) return k;
    const T root = sqrt(pivot);
    for (int i = threadIdx.x; i < r.n; i += cholesky_threads) {
      if (i == at) {
        c(i, k) = root;
        r(i, i) = -T(INFINITY);
      } else if (r(i, i) != -T(INFINITY)) {
        T value = r(at, i);
        for (int m = 0; m < k; ++m) value -= c(i, m) * c(at, m);
        value /= root;
        c(i, k) = value;
        r(i, i) -= value * value;
      }
    }
  }
  return int(r.n);
}

template <class T>
__global__ void __launch_bounds__(cholesky_threads, 1)
    semidefinite_kernel(GpuSemidefinite<T> matrices) {
  NORMALIGN_SHARED(CholeskyShared<T>, memory, [1]);
  CholeskyShared<T>& shared = memory[0];
  const int64_t b = blockIdx.x, stride = matrices.n, n = matrices.ranks[b];
  const Square<T> r{n, stride, matrices.r + b * stride * stride};
  const Square<T> c{n, stride, matrices.factor + b * stride * stride};
  const SystemRows<T> system{n, n, stride, r.at, nullptr};
  T* const diagonal = matrices.diagonal + b * stride;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  save_diagonal(system, diagonal);
  __syncthreads();
  const bool definite = factor_system(shared, system, T(0), 4 * T(n) * epsilon<T>);
  if (!definite) restore_matrix(system, diagonal);
  int odd = 0;  // NaN or infinity: they have ended the factorisation above
  for (int64_t i = warp; i < stride; i += cholesky_threads / 32) {
    for (int64_t j = lane; j < stride; j += 32) {
      const bool inside = j <= i && i < n;
      if (inside && !definite) odd |= !(r(i, j) - r(i, j) == T(0));
      c(i, j) = inside && definite ? r(i, j) : T(0);
    }
  }
  if (definite) return;
  if (__syncthreads_or(odd)) {
    for (int64_t i = warp; i < n; i += cholesky_threads / 32)
      for (int64_t j = lane; j < n; j += 32) c(i, j) = T(NAN);
    return;
  }
  const int rank = factor_pivoted(shared, r, c);
  if (rank == 0)
    for (int64_t i = threadIdx.x; i < n; i += cholesky_threads) c(i, i) = T(1);
  else if (threadIdx.x == 0)
    matrices.ranks[b] = rank;
}

}  // namespace
}  // namespace normalign
