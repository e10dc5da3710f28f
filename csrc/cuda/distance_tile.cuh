// Squared distances of 64 x 64 pairs of points, 4 x 4 a thread, from coordinates that pass through
// shared memory.
//
// By differences: exactly 0 for equal points, and as accurate for near points as for far ones. A
// coordinate costs a subtraction and a multiply-add.
//
// By products, |u|^2 + |v|^2 - 2 u.v: a coordinate costs a multiply-add, but near points cancel.
// Sums run over chunks of at most 16 coordinates, then over chunks, so a product's error is at most
// g = (16 + width / 16) eps / 2 of |u| |v|, and that of the squared distance at most 2 g s with
// s = |u|^2 + |v|^2. Pairs whose squared distance comes out below s / 16 are computed again by
// differences; for the others it is right to 32 g, relatively. The derivative of exp(-(D / L)^q) by
// the logarithm of D^2 is at most q / (2 e), so K is right to 6 q g: in float32, at width 64 and
// for a Laplace kernel, 7e-6 at worst. Rounding errors are random, and what is seen is below 1e-6.
// Whether a pair is near depends on the pair alone, so that equal points have equal rows. Where a
// square overflows, differences may not: such pairs are near too.
#pragma once
#include "portable.cuh"

namespace normalign {
namespace {

constexpr int widest_differences = 32;  // up to here the differences cost no more
constexpr int laplace_threads = 256;
constexpr int laplace_tile = 64;
template <class T>
constexpr int laplace_depth = 64 / sizeof(T);  // coordinates in shared memory at a time
constexpr int laplace_pitch = laplace_tile + 4;
// With more threads than this that have a near pair, the whole tile is computed again.
constexpr int few_near_threads = 24;

template <class T>
struct LaplaceTile {
  T x[laplace_depth<T>][laplace_pitch];
  T z[laplace_depth<T>][laplace_pitch];
  T norms[2][laplace_tile];
  T entries[laplace_tile][laplace_tile + 1];
};

// Coordinates d0, d0 + 1, ... of both sets of points; returns how many there are.
template <class T>
__device__ __forceinline__ int load_coordinates(LaplaceTile<T>& tile, const T* x, int64_t i0,
                                                int64_t m, const T* z, int64_t j0, int64_t n,
                                                int width, int d0) {
  constexpr int depth = laplace_depth<T>;
  __syncthreads();  // the coordinates before have been used
  NORMALIGN_UNROLL
  for (int e = 0; e < laplace_tile * depth / laplace_threads; ++e) {
    const int at = threadIdx.x + e * laplace_threads;
    const int d = at % depth, p = at / depth;
    const bool inside = d0 + d < width;
    tile.x[d][p] = inside && i0 + p < m ? x[(i0 + p) * width + d0 + d] : T(0);
    tile.z[d][p] = inside && j0 + p < n ? z[(j0 + p) * width + d0 + d] : T(0);
  }
  __syncthreads();
  return width - d0 < depth ? width - d0 : depth;
}

// Thread (a, b) of 16 x 16 has rows 4 a .. 4 a + 3 and columns 4 b .. 4 b + 3.
template <class T>
__device__ __forceinline__ void distances_by_differences(LaplaceTile<T>& tile, const T* x,
                                                         int64_t i0, int64_t m, const T* z,
                                                         int64_t j0, int64_t n, int width,
                                                         T (&squared)[4][4]) {
  const int rows = threadIdx.x / 16 * 4, cols = threadIdx.x % 16 * 4;
  for (int d0 = 0; d0 < width; d0 += laplace_depth<T>) {
    const int terms = load_coordinates(tile, x, i0, m, z, j0, n, width, d0);
    for (int d = 0; d < terms; ++d) {
      T u[4], v[4];
      NORMALIGN_UNROLL
      for (int a = 0; a < 4; ++a) {
        u[a] = tile.x[d][rows + a];
        v[a] = tile.z[d][cols + a];
      }
      NORMALIGN_UNROLL
      for (int a = 0; a < 4; ++a) NORMALIGN_UNROLL
      for (int b = 0; b < 4; ++b) {
        const T difference = u[a] - v[b];
        squared[a][b] += difference * difference;
      }
    }
  }
}

// Whether a squared distance that comes from products needs differences. `sum` is that of both
// squares, 0 where they underflow. NaN is near: its differences say what it is.
template <class T>
__device__ __forceinline__ bool is_near(T squared, T sum, T threshold) {
  return !(squared >= sum * threshold) || sum - sum != T(0);
}

// Replaces the squared distances whose bits are set in `near` by sums of squared differences.
template <class T>
__device__ __forceinline__ void near_distances(LaplaceTile<T>& tile, unsigned near, const T* x,
                                               int64_t i0, int64_t m, const T* z, int64_t j0,
                                               int64_t n, int width, T (&squared)[4][4]) {
  const int rows = threadIdx.x / 16 * 4, cols = threadIdx.x % 16 * 4;
  const int threads = __syncthreads_count(near != 0);
  if (threads > few_near_threads) {
    // What stays waits in shared memory, where each thread has its own places.
    NORMALIGN_UNROLL
    for (int a = 0; a < 4; ++a) NORMALIGN_UNROLL
    for (int b = 0; b < 4; ++b) {
      tile.entries[rows + a][cols + b] = squared[a][b];
      squared[a][b] = T(0);
    }
    distances_by_differences(tile, x, i0, m, z, j0, n, width, squared);
    NORMALIGN_UNROLL
    for (int a = 0; a < 4; ++a) NORMALIGN_UNROLL
    for (int b = 0; b < 4; ++b)
      if (!(near >> (4 * a + b) & 1)) squared[a][b] = tile.entries[rows + a][cols + b];
    return;
  }
  // The diagonal, and duplicates: few, straight from memory, in the same order.
  NORMALIGN_UNROLL
  for (int e = 0; e < 16; ++e) {
    const int64_t i = i0 + rows + e / 4, j = j0 + cols + e % 4;
    if (!(near >> e & 1) || i >= m || j >= n) continue;
    T sum = T(0);
    NORMALIGN_LOOP
    for (int d = 0; d < width; ++d) {
      const T difference = x[i * width + d] - z[j * width + d];
      sum += difference * difference;
    }
    squared[e / 4][e % 4] = sum;
  }
}

template <class T>
__device__ __forceinline__ void distances_by_products(LaplaceTile<T>& tile, const T* x, int64_t i0,
                                                      int64_t m, const T* z, int64_t j0, int64_t n,
                                                      int width, T (&squared)[4][4]) {
  const int rows = threadIdx.x / 16 * 4, cols = threadIdx.x % 16 * 4;
  T norm = T(0);  // of one point: threads below 64 have a point x, the next 64 a point z
  const int own = threadIdx.x % laplace_tile, side = threadIdx.x / laplace_tile;
  for (int d0 = 0; d0 < width; d0 += laplace_depth<T>) {
    const int terms = load_coordinates(tile, x, i0, m, z, j0, n, width, d0);
    T product[4][4] = {}, square = T(0);
    for (int d = 0; d < terms; ++d) {
      T u[4], v[4];
      NORMALIGN_UNROLL
      for (int a = 0; a < 4; ++a) {
        u[a] = tile.x[d][rows + a];
        v[a] = tile.z[d][cols + a];
      }
      NORMALIGN_UNROLL
      for (int a = 0; a < 4; ++a) NORMALIGN_UNROLL
      for (int b = 0; b < 4; ++b) product[a][b] += u[a] * v[b];
      if (side < 2) {
        const T w = side == 0 ? tile.x[d][own] : tile.z[d][own];
        square += w * w;
      }
    }
    NORMALIGN_UNROLL
    for (int a = 0; a < 4; ++a) NORMALIGN_UNROLL
    for (int b = 0; b < 4; ++b) squared[a][b] += product[a][b];
    norm += square;
  }
  if (side < 2) tile.norms[side][own] = norm;
  __syncthreads();
  unsigned near = 0;
  NORMALIGN_UNROLL
  for (int a = 0; a < 4; ++a) NORMALIGN_UNROLL
  for (int b = 0; b < 4; ++b) {
    const T sum = tile.norms[0][rows + a] + tile.norms[1][cols + b];
    squared[a][b] = sum - T(2) * squared[a][b];
    if (is_near(squared[a][b], sum, T(1.0 / 16))) near |= 1u << (4 * a + b);
  }
  near_distances(tile, near, x, i0, m, z, j0, n, width, squared);
}

}  // namespace
}  // namespace normalign
