// See laplace.h. Every kernel makes 64 x 64 tiles of K or W, 4 x 4 entries a thread.
#pragma once
#include "distance_tile.cuh"
#include "kernel_value.cuh"

namespace normalign {
namespace {

constexpr int kept_cols = 64;  // result columns of a streaming kernel's block

// Makes entry (i, j) = value(i, j, squared distance) of 4 x 4 squared distances a thread.
template <class T, class Value>
__device__ __forceinline__ void make_entries(LaplaceTile<T>& tile, const T (&squared)[4][4],
                                             Value value) {
  const int rows = threadIdx.x / 16 * 4, cols = threadIdx.x % 16 * 4;
  NORMALIGN_UNROLL
  for (int a = 0; a < 4; ++a) NORMALIGN_UNROLL
  for (int b = 0; b < 4; ++b) tile.entries[rows + a][cols + b] = squared[a][b];
  // Each thread goes on with its own entries, so no barrier is needed in between. A loop, because
  // sixteen copies of the exponential would fill the registers.
  NORMALIGN_LOOP
  for (int e = 0; e < 16; ++e) {
    const int i = rows + e / 4, j = cols + e % 4;
    tile.entries[i][j] = value(i, j, tile.entries[i][j]);
  }
  __syncthreads();
}

// The entries between 64 points x from i0 on and 64 points z from j0 on. Points that do not exist
// count as zeros.
template <class T, bool products = false, class Value>
__device__ __forceinline__ void make_tile(LaplaceTile<T>& tile, const T* x, int64_t i0, int64_t m,
                                          const T* z, int64_t j0, int64_t n, int width,
                                          Value value) {
  T squared[4][4] = {};
  if constexpr (products)
    distances_by_products(tile, x, i0, m, z, j0, n, width, squared);
  else
    distances_by_differences(tile, x, i0, m, z, j0, n, width, squared);
  make_entries(tile, squared, value);
}

// Entries into their places, and where `mirrored` also into those on the diagonal's other side.
template <class T>
__device__ __forceinline__ void write_entries(const LaplaceTile<T>& tile, int64_t i0, int64_t m,
                                              int64_t j0, int64_t n, bool mirrored, T* out,
                                              int64_t stride) {
  const auto& result = tile.entries;
  for (int e = threadIdx.x; e < laplace_tile * laplace_tile; e += laplace_threads) {
    const int i = e / laplace_tile, j = e % laplace_tile;
    if (i0 + i < m && j0 + j < n) out[(i0 + i) * stride + j0 + j] = result[i][j];
    if (mirrored && j0 + i < n && i0 + j < m) out[(j0 + i) * stride + i0 + j] = result[j][i];
  }
}

// One problem of a batch of Gram matrices.
template <class T>
struct GramProblem {
  const T *x, *z;
  T* out;
  int64_t m, n, stride;
  bool symmetric;

  __device__ __forceinline__ GramProblem(GpuBatch batch, int64_t rows, int64_t cols, int width,
                                         const T* points_x, const T* points_z, T* result)
      : stride(cols) {
    const int64_t problem = blockIdx.z;
    // Not some of the rows against all.
    symmetric = points_x == points_z && rows == cols && batch.own_m == batch.own_n;
    x = points_x + problem * rows * width;
    z = points_z + problem * cols * width;
    out = result + problem * rows * cols;
    m = batch.own_m ? batch.own_m[problem] : rows;
    n = batch.own_n ? batch.own_n[problem] : cols;
  }
};

template <class T, bool weights, bool products>
__global__ void __launch_bounds__(laplace_threads, 1)
    gram_kernel(GpuKernel<T> k, GpuBatch batch, int64_t m, int64_t n, int width, const T* x,
                const T* z, T* out) {
  NORMALIGN_SHARED(LaplaceTile<T>, tile, [1]);
  const GramProblem<T> p(batch, m, n, width, x, z, out);
  if (p.symmetric && blockIdx.x < blockIdx.y) return;  // the mirror tile writes this one
  const int64_t i0 = int64_t(blockIdx.y) * laplace_tile, j0 = int64_t(blockIdx.x) * laplace_tile;
  if (i0 >= p.m || j0 >= p.n) return;
  make_tile<T, products>(tile[0], p.x, i0, p.m, p.z, j0, p.n, width, [&](int, int, T squared) {
    return weights ? kernel_weight(k, squared) : kernel_value(k, squared);
  });
  write_entries(tile[0], i0, p.m, j0, p.n, p.symmetric && i0 != j0, p.out, p.stride);
}

// What a streaming kernel sums over the points z.
enum class Sum {
  outputs,   // K_ij coef_jk
  gradient,  // W_ij (sum_k cotangent_ik coef_jk) (z_j - x_i)
  jacobian   // W_ij coef_jk (z_j - x_i), for each k
};

// blockIdx.x is a tile of rows, .y a part of the points z, .z a problem and a range of kept_cols
// result columns. A thread sums row threadIdx.x / 4 and every fourth column.
template <class T, Sum kind>
__global__ void __launch_bounds__(laplace_threads, 1)
    stream_kernel(GpuKernel<T> k, GpuBatch batch, int64_t m, int64_t n, int width, int c,
                  const T* x, const T* z, const T* coef, const T* cotangent, T* out) {
  NORMALIGN_SHARED(LaplaceTile<T>, tile, [1]);
  constexpr bool differences = kind != Sum::outputs;
  const auto& factors = tile[0].entries;
  const int ranges = gridDim.z / batch.count;
  const int64_t problem = blockIdx.z / ranges;
  const int results = kind == Sum::outputs ? c : kind == Sum::gradient ? width : c * width;
  x += problem * m * width;
  z += problem * n * width;
  coef += problem * n * c;
  cotangent += problem * m * c;
  out += (blockIdx.y * int64_t(batch.count) + problem) * m * results;
  const int64_t i0 = int64_t(blockIdx.x) * laplace_tile, rows = m;
  if (batch.own_m) m = batch.own_m[problem];
  if (batch.own_n) n = batch.own_n[problem];
  const int64_t tiles = i0 < m ? (n + laplace_tile - 1) / laplace_tile : 0;
  const int64_t first = tiles * blockIdx.y / gridDim.y, last = tiles * (blockIdx.y + 1) / gridDim.y;
  const int own = threadIdx.x / 4;
  const int col0 = blockIdx.z % ranges * kept_cols + threadIdx.x % 4;
  const int64_t i = i0 + own;
  T sum[kept_cols / 4] = {}, origin[kept_cols / 4] = {};
  int output[kept_cols / 4] = {}, column[kept_cols / 4] = {};  // of a result, in coef and in z
  NORMALIGN_UNROLL
  for (int q = 0; q < kept_cols / 4; ++q) {
    const int col = col0 + 4 * q;
    if (kind == Sum::jacobian) output[q] = col / width;
    column[q] = kind == Sum::jacobian ? col - output[q] * width : col;
    if (differences && i < m && col < results) origin[q] = x[i * width + column[q]];
  }
  for (int64_t t = first; t < last; ++t) {
    const int64_t j0 = t * laplace_tile;
    make_tile(tile[0], x, i0, m, z, j0, n, width, [&](int a, int b, T squared) {
      if (i0 + a >= m || j0 + b >= n) return T(0);
      if constexpr (kind == Sum::outputs) return kernel_value(k, squared);
      if constexpr (kind == Sum::jacobian) return kernel_weight(k, squared);
      T product = T(0);
      for (int q = 0; q < c; ++q) product += cotangent[(i0 + a) * c + q] * coef[(j0 + b) * c + q];
      return kernel_weight(k, squared) * product;
    });
    const int points = n - j0 < laplace_tile ? int(n - j0) : laplace_tile;
    for (int j = 0; j < points; ++j) {
      const T factor = factors[own][j];
      const T* const right = differences ? z + (j0 + j) * width : coef + (j0 + j) * c;
      NORMALIGN_UNROLL
      for (int q = 0; q < kept_cols / 4; ++q) {
        if (col0 + 4 * q >= results) continue;
        const T value = differences ? right[column[q]] - origin[q] : right[column[q]];
        const T scaled = kind == Sum::jacobian ? factor * coef[(j0 + j) * c + output[q]] : factor;
        sum[q] += scaled * value;
      }
    }
    __syncthreads();
  }
  if (i >= rows) return;
  NORMALIGN_UNROLL
  for (int q = 0; q < kept_cols / 4; ++q)
    if (col0 + 4 * q < results) out[i * results + col0 + 4 * q] = sum[q];
}

// A result for each thread; blockIdx.y is the problem. Products are rounded and added in one order,
// as in attack.cuh, so that equal points give equal results wherever they are made.
template <class T>
__global__ void __launch_bounds__(laplace_threads, 1)
    project_kernel(int64_t m, int d, int width, const int* table, const double* x,
                   const double* factor, T* out) {
  const int64_t problem = blockIdx.y;
  const int64_t at = int64_t(blockIdx.x) * laplace_threads + threadIdx.x;
  if (at >= m * width) return;
  x += (table[problem] * m + at / width) * d;
  factor += problem * d * width + at % width;
  double sum = 0;
  for (int k = 0; k < d; ++k)
    sum = add_rounded(sum, multiply_rounded(x[k], factor[int64_t(k) * width]));
  out[problem * m * width + at] = T(sum);
}

}  // namespace
}  // namespace normalign
