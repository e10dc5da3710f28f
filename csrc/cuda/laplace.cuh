// See laplace.h. Every kernel makes 64 x 64 tiles of K or W, 4 x 4 entries a thread.
#pragma once
#include "distance_tile.cuh"
#include "kernel_value.cuh"

namespace normalign {
namespace {

constexpr int kept_cols = 64;  // result columns of a streaming kernel's block

// Makes entry (i, j) = value(i, j, squared distance) for 64 points x from i0 on and 64 points z
// from j0 on. Points that do not exist count as zeros.
template <class T, bool products = false, class Value>
__device__ __forceinline__ void make_tile(LaplaceTile<T>& tile, const T* x, int64_t i0, int64_t m,
                                          const T* z, int64_t j0, int64_t n, int width,
                                          Value value) {
  const int rows = threadIdx.x / 16 * 4, cols = threadIdx.x % 16 * 4;
  T squared[4][4] = {};
  if constexpr (products)
    distances_by_products(tile, x, i0, m, z, j0, n, width, squared);
  else
    distances_by_differences(tile, x, i0, m, z, j0, n, width, squared);
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

template <class T, bool weights, bool products>
__global__ void __launch_bounds__(laplace_threads, 1)
    gram_kernel(GpuKernel<T> k, int64_t m, int64_t n, int width, const T* x, const T* z, T* out) {
  NORMALIGN_SHARED(LaplaceTile<T>, tile, [1]);
  const bool symmetric = x == z && m == n;           // not some of the rows against all
  if (symmetric && blockIdx.x < blockIdx.y) return;  // the mirror tile writes this one
  const int64_t i0 = int64_t(blockIdx.y) * laplace_tile, j0 = int64_t(blockIdx.x) * laplace_tile;
  make_tile<T, products>(tile[0], x, i0, m, z, j0, n, width, [&](int, int, T squared) {
    return weights ? kernel_weight(k, squared) : kernel_value(k, squared);
  });
  const auto& result = tile[0].entries;
  for (int e = threadIdx.x; e < laplace_tile * laplace_tile; e += laplace_threads) {
    const int i = e / laplace_tile, j = e % laplace_tile;
    if (i0 + i < m && j0 + j < n) out[(i0 + i) * n + j0 + j] = result[i][j];
    if (symmetric && i0 != j0 && j0 + i < n && i0 + j < m)
      out[(j0 + i) * n + i0 + j] = result[j][i];
  }
}

// Both streaming kernels: blockIdx.x is a tile of rows, .y a part of the points z, .z a range of
// kept_cols result columns. A thread sums row threadIdx.x / 4 and every fourth column.
template <class T, bool gradient>
__global__ void __launch_bounds__(laplace_threads, 1)
    stream_kernel(GpuKernel<T> k, int64_t m, int64_t n, int width, int c, const T* x, const T* z,
                  const T* coef, const T* cotangent, T* out) {
  NORMALIGN_SHARED(LaplaceTile<T>, tile, [1]);
  const auto& factors = tile[0].entries;
  const int64_t i0 = int64_t(blockIdx.x) * laplace_tile;
  const int64_t tiles = (n + laplace_tile - 1) / laplace_tile;
  const int64_t first = tiles * blockIdx.y / gridDim.y, last = tiles * (blockIdx.y + 1) / gridDim.y;
  const int own = threadIdx.x / 4, col0 = blockIdx.z * kept_cols + threadIdx.x % 4;
  const int results = gradient ? width : c;
  const int64_t i = i0 + own;
  T sum[kept_cols / 4] = {}, origin[kept_cols / 4] = {};
  if (gradient && i < m) {
    NORMALIGN_UNROLL
    for (int q = 0; q < kept_cols / 4; ++q)
      if (col0 + 4 * q < width) origin[q] = x[i * width + col0 + 4 * q];
  }
  for (int64_t t = first; t < last; ++t) {
    const int64_t j0 = t * laplace_tile;
    make_tile(tile[0], x, i0, m, z, j0, n, width, [&](int a, int b, T squared) {
      if (i0 + a >= m || j0 + b >= n) return T(0);
      if constexpr (!gradient) return kernel_value(k, squared);
      T product = T(0);
      for (int q = 0; q < c; ++q) product += cotangent[(i0 + a) * c + q] * coef[(j0 + b) * c + q];
      return kernel_weight(k, squared) * product;
    });
    const int points = n - j0 < laplace_tile ? int(n - j0) : laplace_tile;
    for (int j = 0; j < points; ++j) {
      const T factor = factors[own][j];
      const T* const right = gradient ? z + (j0 + j) * width : coef + (j0 + j) * c;
      NORMALIGN_UNROLL
      for (int q = 0; q < kept_cols / 4; ++q)
        if (col0 + 4 * q < results)
          sum[q] += factor * (gradient ? right[col0 + 4 * q] - origin[q] : right[col0 + 4 * q]);
    }
    __syncthreads();
  }
  if (i >= m) return;
  NORMALIGN_UNROLL
  for (int q = 0; q < kept_cols / 4; ++q)
    if (col0 + 4 * q < results) out[(blockIdx.y * m + i) * results + col0 + 4 * q] = sum[q];
}

}  // namespace
}  // namespace normalign
