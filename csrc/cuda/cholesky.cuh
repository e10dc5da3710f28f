// See cholesky.h. Left-looking: a panel of 32 columns takes up all columns before it at once, in
// register tiles, so that a system is read n / 64 times and written once. Right-hand sides are rows
// below the matrix, which makes the forward substitution a part of the factorisation. The triangle
// above the diagonal is left alone, so that a system that fails can be taken up again.
#pragma once
#include "cholesky.h"
#include "portable.cuh"

namespace normalign {
namespace {

constexpr int cholesky_threads = 256;
constexpr int cholesky_panel = 32;
constexpr int cholesky_rows = 256;  // that a panel takes up at a time: a thread has 8 of them
constexpr int cholesky_group = 64;  // of these rows
constexpr int together = 4;         // right-hand sides in the backward substitution
template <class T>
constexpr int cholesky_depth = 64 / sizeof(T);  // columns in shared memory at a time
template <class T>
constexpr T epsilon = sizeof(T) == 8 ? T(0x1p-52) : T(0x1p-23);

template <class T>
struct alignas(16) CholeskyShared {
  // Pitches that give a warp's stores different banks and keep pairs aligned.
  T rows[cholesky_depth<T>][cholesky_rows + 2];
  T cols[cholesky_depth<T>][cholesky_panel + 2];
  // With rows of zeros below it, for rows of x that have moved past its end.
  T diagonal[cholesky_panel * 3 / 2][cholesky_panel + 1];
  T inverse[cholesky_panel];
  T x[together][cholesky_panel];
  int place[cholesky_threads / 32];
};

// One system; row n + r is its right-hand side r.
template <class T>
struct SystemRows {
  int64_t n, total, stride;
  T *k, *y;
  __device__ __forceinline__ T* at(int64_t i) const {
    return i < n ? k + i * stride : y + (i - n) * stride;
  }
};

// Columns j0 .. j0 + 31 less the products of the columns before them, on and below the diagonal.
// Thread (a, b) of 32 x 8 has the pairs of rows from 2 a, 2 a + 64, ... on and the pairs of columns
// from 2 b and 2 b + 16 on.
template <class T>
__device__ __forceinline__ void update_panel(CholeskyShared<T>& shared, SystemRows<T> system,
                                             int64_t j0) {
  constexpr int depth = cholesky_depth<T>;
  const int row = threadIdx.x / 8 * 2, col = threadIdx.x % 8 * 2;
  for (int64_t i0 = j0; i0 < system.total; i0 += cholesky_rows) {
    const int64_t left = system.total - i0;
    const int rows = left < cholesky_rows ? int(left) : cholesky_rows;
    const int groups = (rows + cholesky_group - 1) / cholesky_group;
    T sum[8][4] = {};
    for (int64_t k0 = 0; k0 < j0; k0 += depth) {
      __syncthreads();  // the columns before have been used
      for (int e = threadIdx.x; e < groups * cholesky_group * depth; e += cholesky_threads) {
        const int k = e % depth, r = e / depth;
        shared.rows[k][r] = r < rows ? system.at(i0 + r)[k0 + k] : T(0);
      }
      for (int e = threadIdx.x; e < cholesky_panel * depth; e += cholesky_threads) {
        const int k = e % depth, r = e / depth;
        shared.cols[k][r] = j0 + r < system.n ? system.at(j0 + r)[k0 + k] : T(0);
      }
      __syncthreads();
      NORMALIGN_UNROLL
      for (int k = 0; k < depth; ++k) {
        const auto v0 = load_pack<2>(&shared.cols[k][col]);
        const auto v1 = load_pack<2>(&shared.cols[k][col + 16]);
        NORMALIGN_UNROLL
        for (int s = 0; s < 4; ++s) {
          if (s >= groups) continue;
          const auto u = load_pack<2>(&shared.rows[k][row + s * cholesky_group]);
          NORMALIGN_UNROLL
          for (int e = 0; e < 2; ++e) {
            sum[2 * s + e][0] += u.v[e] * v0.v[0];
            sum[2 * s + e][1] += u.v[e] * v0.v[1];
            sum[2 * s + e][2] += u.v[e] * v1.v[0];
            sum[2 * s + e][3] += u.v[e] * v1.v[1];
          }
        }
      }
    }
    NORMALIGN_UNROLL
    for (int s = 0; s < 8; ++s) {
      const int r = row + s / 2 * cholesky_group + s % 2;
      if (r >= rows) continue;
      T* const out = system.at(i0 + r);
      NORMALIGN_UNROLL
      for (int q = 0; q < 4; ++q) {
        const int64_t j = j0 + col + q / 2 * 16 + q % 2;
        if (j < system.n && j <= i0 + r) out[j] -= sum[s][q];
      }
    }
  }
}

// The diagonal block at j0 into shared memory; columns that do not exist are those of the identity.
template <class T>
__device__ __forceinline__ void load_diagonal(CholeskyShared<T>& shared, SystemRows<T> system,
                                              int64_t j0, T ridge) {
  for (int e = threadIdx.x; e < cholesky_panel * cholesky_panel; e += cholesky_threads) {
    const int i = e / cholesky_panel, j = e % cholesky_panel;
    T value = i == j ? T(1) : T(0);
    if (j <= i && j0 + i < system.n) value = system.at(j0 + i)[j0 + j] + (i == j ? ridge : T(0));
    shared.diagonal[i][j] = value;
  }
}

// Factors that block, in shared memory and in the matrix; false where a pivot is not positive.
template <class T>
__device__ __forceinline__ bool factor_diagonal(CholeskyShared<T>& shared, SystemRows<T> system,
                                                int64_t j0, T ridge, T& least) {
  auto& block = shared.diagonal;
  load_diagonal(shared, system, j0, ridge);
  NORMALIGN_LOOP
  for (int j = 0; j < cholesky_panel; ++j) {
    __syncthreads();
    const T pivot = block[j][j];
    if (!(pivot > T(0))) return false;
    if (j0 + j < system.n && pivot < least) least = pivot;
    const T scale = T(1) / pivot;
    for (int e = threadIdx.x; e < cholesky_panel * cholesky_panel; e += cholesky_threads) {
      const int i = e / cholesky_panel, q = e % cholesky_panel;
      if (q > j && q <= i) block[i][q] -= block[i][j] * scale * block[q][j];
    }
  }
  __syncthreads();
  // Columns still lack the root of their pivot, which every thread needs before it is replaced.
  constexpr int own = cholesky_panel * cholesky_panel / cholesky_threads;
  T root[own];
  NORMALIGN_UNROLL
  for (int e = 0; e < own; ++e) {
    const int j = (threadIdx.x + e * cholesky_threads) % cholesky_panel;
    root[e] = sqrt(block[j][j]);
  }
  __syncthreads();
  NORMALIGN_UNROLL
  for (int e = 0; e < own; ++e) {
    const int at = threadIdx.x + e * cholesky_threads;
    const int i = at / cholesky_panel, j = at % cholesky_panel;
    const T value = i == j ? root[e] : block[i][j] / root[e];
    if (i == j) shared.inverse[j] = T(1) / root[e];
    block[i][j] = value;
    if (j <= i && j0 + i < system.n) system.at(j0 + i)[j0 + j] = value;
  }
  __syncthreads();
  return true;
}

// Takes columns first .. first + 15 of a row to its solution. x begins with column `first` and
// moves along by one in each step, so that a loop can do it: the compiler unrolls all 32 steps only
// with much of the block in registers, and spills them.
template <int kept, class T>
__device__ __forceinline__ void solve_columns(const CholeskyShared<T>& shared, T* x, int first,
                                              int used, T* row) {
  NORMALIGN_LOOP
  for (int j = first; j < first + cholesky_panel / 2; ++j) {
    const T known = x[0] * shared.inverse[j];
    if (j < used) row[j] = known;
    NORMALIGN_UNROLL
    for (int q = 1; q < kept; ++q) x[q - 1] = x[q] - known * shared.diagonal[j + q][j];
  }
}

// Rows below the diagonal block: times the transposed inverse of its factor, a row for each thread.
template <class T>
__device__ __forceinline__ void solve_panel(const CholeskyShared<T>& shared, SystemRows<T> system,
                                            int64_t j0) {
  const int width = system.n - j0 < cholesky_panel ? int(system.n - j0) : cholesky_panel;
  for (int64_t i = j0 + width + threadIdx.x; i < system.total; i += cholesky_threads) {
    T* const row = system.at(i) + j0;
    T x[cholesky_panel];
    NORMALIGN_UNROLL
    for (int j = 0; j < cholesky_panel; ++j) x[j] = j < width ? row[j] : T(0);
    solve_columns<cholesky_panel>(shared, x, 0, width, row);
    solve_columns<cholesky_panel / 2>(shared, x, cholesky_panel / 2, width, row);
  }
}

// L^T a = y, from the last panel to the first. A warp solves a right-hand side in the diagonal
// block, then every thread takes its columns of the rows before.
template <class T>
__device__ __forceinline__ void substitute_back(CholeskyShared<T>& shared, SystemRows<T> system) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t c = system.total - system.n;
  for (int64_t j0 = (system.n - 1) / cholesky_panel * cholesky_panel; j0 >= 0;
       j0 -= cholesky_panel) {
    const int width = system.n - j0 < cholesky_panel ? int(system.n - j0) : cholesky_panel;
    __syncthreads();
    load_diagonal(shared, system, j0, T(0));
    __syncthreads();
    for (int64_t r0 = 0; r0 < c; r0 += together) {
      const int few = c - r0 < together ? int(c - r0) : together;
      if (warp < few) {
        T* const y = system.y + (r0 + warp) * system.stride + j0;
        T value = lane < width ? y[lane] : T(0);
        for (int t = width - 1; t >= 0; --t) {
          const T known = __shfl_sync(0xffffffffu, value, t) / shared.diagonal[t][t];
          if (lane == t) value = known;
          if (lane < t) value -= shared.diagonal[t][lane] * known;
        }
        if (lane < width) y[lane] = value;
        shared.x[warp][lane] = value;
      }
      __syncthreads();
      for (int64_t k = threadIdx.x; k < j0; k += cholesky_threads) {
        T sum[together] = {};
        for (int t = 0; t < width; ++t) {
          const T entry = system.k[(j0 + t) * system.stride + k];
          NORMALIGN_UNROLL
          for (int q = 0; q < together; ++q)
            if (q < few) sum[q] += entry * shared.x[q][t];
        }
        NORMALIGN_UNROLL
        for (int q = 0; q < together; ++q)
          if (q < few) system.y[(r0 + q) * system.stride + k] -= sum[q];
      }
      __syncthreads();
    }
  }
}

template <class T>
__device__ __forceinline__ T greatest_diagonal(CholeskyShared<T>& shared, SystemRows<T> system,
                                               T shift) {
  T most = T(0);
  for (int64_t i = threadIdx.x; i < system.n; i += cholesky_threads) {
    const T entry = system.k[i * system.stride + i] + shift;
    most = entry > most ? entry : most;
  }
  NORMALIGN_UNROLL
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const T other = __shfl_xor_sync(0xffffffffu, most, lanes);
    most = other > most ? other : most;
  }
  if (threadIdx.x % 32 == 0) shared.inverse[threadIdx.x / 32] = most;
  __syncthreads();
  for (int w = 0; w < cholesky_threads / 32; ++w)
    most = shared.inverse[w] > most ? shared.inverse[w] : most;
  __syncthreads();
  return most;
}

// A copy of the diagonal, which the factor replaces; the triangle above it stays as it is.
template <class T>
__device__ __forceinline__ void save_diagonal(SystemRows<T> system, T* diagonal) {
  for (int64_t i = threadIdx.x; i < system.n; i += cholesky_threads)
    diagonal[i] = system.k[i * system.stride + i];
}

// The matrix as it was, from that copy and the triangle above. Barriers stand around it.
template <class T>
__device__ __forceinline__ void restore_matrix(SystemRows<T> system, const T* diagonal) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
  for (int64_t i = warp; i < system.n; i += cholesky_threads / 32)
    for (int64_t j = lane; j <= i; j += 32)
      system.k[i * system.stride + j] = j == i ? diagonal[i] : system.k[j * system.stride + i];
  __syncthreads();
}

// L with L L^T = K + shift I in the lower triangle. False where a pivot is not above `noise` times
// the greatest entry of the diagonal: it is left over from products of that size.
template <class T>
__device__ __forceinline__ bool factor_system(CholeskyShared<T>& shared, SystemRows<T> system,
                                              T shift, T noise) {
  for (int e = threadIdx.x; e < cholesky_panel / 2 * cholesky_panel; e += cholesky_threads)
    shared.diagonal[cholesky_panel + e / cholesky_panel][e % cholesky_panel] = T(0);
  const T most = greatest_diagonal(shared, system, shift);
  T least = T(INFINITY);
  NORMALIGN_LOOP
  for (int64_t j0 = 0; j0 < system.n; j0 += cholesky_panel) {
    if (j0 > 0) update_panel(shared, system, j0);
    __syncthreads();
    if (!factor_diagonal(shared, system, j0, shift, least)) return false;
    solve_panel(shared, system, j0);
    __syncthreads();
  }
  return least > noise * most;
}

template <class T>
__global__ void __launch_bounds__(cholesky_threads, 1) cholesky_kernel(GpuSystems<T> systems) {
  NORMALIGN_SHARED(CholeskyShared<T>, memory, [1]);
  CholeskyShared<T>& shared = memory[0];
  const int64_t b = blockIdx.x, c = systems.c;
  const int64_t n = systems.sizes ? systems.sizes[b] : systems.n;
  const SystemRows<T> system{n, n + c, systems.n, systems.k + b * systems.n * systems.n,
                             systems.y + b * c * systems.n};
  const T* const targets = systems.targets + b * c * systems.n;
  T* const diagonal = systems.diagonal + b * systems.n;
  const T ridge = systems.ridge ? systems.ridge[b] : T(0);
  save_diagonal(system, diagonal);
  bool solved = false;
  T jitter = T(0);
  NORMALIGN_LOOP
  for (int step = 0; step < systems.steps && !solved; ++step) {
    if (step > 0) restore_matrix(system, diagonal);
    for (int64_t r = 0; r < c; ++r)
      for (int64_t j = threadIdx.x; j < n; j += cholesky_threads)
        system.y[r * system.stride + j] = targets[r * system.stride + j];
    __syncthreads();
    jitter = systems.ladder[step];
    solved = factor_system(shared, system, ridge + jitter, epsilon<T>);
  }
  if (solved && n > 0) substitute_back(shared, system);
  __syncthreads();
  T* const coef = systems.coef + b * systems.n * c;
  for (int64_t e = threadIdx.x; e < systems.n * c; e += cholesky_threads) {
    const int64_t j = e / c, r = e - j * c;
    const T value = j < n ? system.y[r * system.stride + j] : T(0);
    coef[e] = solved ? value : T(NAN);
  }
  if (threadIdx.x == 0) systems.jitter[b] = solved ? jitter : T(NAN);
}

}  // namespace
}  // namespace normalign
