// Squared distances of 128 x 128 pairs of points by tensor cores, in quarters of 64 x 64 pairs, 4 x
// 4 a thread.
//
// Every coordinate is first rounded to r(u) = u (1 + e), |e| <= eps: 2^-11 in tf32, 2^-8 in bf16.
// Norms are those of the rounded points too, so that |r(u)|^2 + |r(v)|^2 - 2 r(u).r(v) is the
// squared distance of two points that have moved by eps |u| and eps |v| at most: the distance D is
// off by eps (|u| + |v|), which does not grow where points are near, and K is the matrix of
// slightly moved points.
//
// Pairs with D^2 < near s, s = |u|^2 + |v|^2, are computed again by differences of the points as
// they were. For the others (|u| + |v|) / D <= sqrt(2 / near), so log D is off by eps sqrt(2 /
// near) and K = exp(-(D / L)^q) by
//   (q / e) eps sqrt(2 / near): 1.02e-3 q in tf32 (near = 1/16), 4.07e-3 q in bf16 (near = 1/4);
//   eps (|u| + |v|) / L for q >= 1, where K falls by at most 1 for each L: better where L is long.
// Sums are float32, cut and not rounded by tensor cores: 2 u.v is off by at most 1.5 width 2^-23 s
// (steps of 4 or more products, each product and each step's sum cut), norms by (32 + width / 32)
// 2^-24 s, the difference by 2^-23 s. D^2 / s is off by the sum of these and K by q / (2 e near)
// of it, 4e-5 in tf32 at width 64, on top of the above.
#pragma once
#include "distance_tile.cuh"
#include "warp_matrix.cuh"

namespace normalign {
namespace {

constexpr int tensor_tile = 2 * laplace_tile;
constexpr int tensor_depth = 32;  // coordinates in shared memory at a time

namespace wmma = nvcuda::wmma;

struct Tf32 {
  using Stored = float;
  static constexpr int step = 8;  // coordinates of one product of fragments
  static constexpr int pitch = tensor_depth + 4;
  static constexpr float near = 1.0f / 16;
#if defined(NORMALIGN_TENSOR_CORES)
  using Factor = wmma::precision::tf32;
  static __device__ __forceinline__ float round(float u) { return wmma::__float_to_tf32(u); }
#endif
  static __device__ __forceinline__ float value(float u) { return u; }
};

struct Bf16 {
  using Factor = __nv_bfloat16;
  using Stored = __nv_bfloat16;
  static constexpr int step = 16;
  static constexpr int pitch = tensor_depth + 8;
  static constexpr float near = 1.0f / 4;  // factors are coarser, so it must not be as near
  static __device__ __forceinline__ Stored round(float u) { return __float2bfloat16_rn(u); }
  static __device__ __forceinline__ float value(Stored u) { return __bfloat162float(u); }
};

// More than is static: 95 KB, of which two fit on sm_90 and one on every GPU from sm_80 on.
template <class P>
struct alignas(32) TensorTile {
  union {
    typename P::Stored points[2][tensor_tile][P::pitch];  // rounded; x, then z
    float products[tensor_tile][tensor_tile + 4];
  };
  LaplaceTile<float> quarter;  // for near pairs, and the results
  float norms[2][tensor_tile];
};

static_assert(sizeof(TensorTile<Tf32>) <= 99 << 10, "what every GPU from sm_80 on has");
static_assert(sizeof(TensorTile<Bf16>) <= 99 << 10, "what every GPU from sm_80 on has");

#if defined(NORMALIGN_TENSOR_CORES)
// Coordinates d0, d0 + 1, ... of both sets of points, rounded; 0 where there are none.
template <class P>
__device__ __forceinline__ void load_rounded(TensorTile<P>& tile, const float* x, int64_t i0,
                                             int64_t m, const float* z, int64_t j0, int64_t n,
                                             int width, int d0) {
  const int d = threadIdx.x % tensor_depth;
  const bool inside = d0 + d < width;
  constexpr int step = laplace_threads / tensor_depth;
  constexpr int at_once = 8;  // more loads would need more registers than there are
  NORMALIGN_LOOP
  for (int p0 = threadIdx.x / tensor_depth; p0 < tensor_tile; p0 += at_once * step) {
    NORMALIGN_UNROLL
    for (int e = 0; e < at_once; ++e) {
      const int p = p0 + e * step;
      const float u = inside && i0 + p < m ? x[(i0 + p) * width + d0 + d] : 0.0f;
      const float v = inside && j0 + p < n ? z[(j0 + p) * width + d0 + d] : 0.0f;
      tile.points[0][p][d] = P::round(u);
      tile.points[1][p][d] = P::round(v);
    }
  }
}

// u.v of all pairs and the norms of all points, in shared memory. Warp w makes the pairs of rows 32
// (w / 2) and columns 64 (w % 2) and the following.
template <class P>
__device__ __forceinline__ void tensor_products(TensorTile<P>& tile, const float* x, int64_t i0,
                                                int64_t m, const float* z, int64_t j0, int64_t n,
                                                int width) {
  using A = wmma::fragment<wmma::matrix_a, 16, 16, P::step, typename P::Factor, wmma::row_major>;
  using B = wmma::fragment<wmma::matrix_b, 16, 16, P::step, typename P::Factor, wmma::col_major>;
  constexpr int pack = wide<typename P::Stored>;
  const int row0 = threadIdx.x / 64 * 32, col0 = threadIdx.x / 32 % 2 * 64;
  const auto& own = tile.points[threadIdx.x / tensor_tile][threadIdx.x % tensor_tile];
  wmma::fragment<wmma::accumulator, 16, 16, P::step, float> sums[2][4];
  NORMALIGN_UNROLL
  for (int a = 0; a < 2; ++a) NORMALIGN_UNROLL
  for (int b = 0; b < 4; ++b) wmma::fill_fragment(sums[a][b], 0.0f);
  float norm = 0.0f;
  for (int d0 = 0; d0 < width; d0 += tensor_depth) {
    load_rounded(tile, x, i0, m, z, j0, n, width, d0);
    __syncthreads();
    NORMALIGN_UNROLL
    for (int k = 0; k < tensor_depth; k += P::step) {
      if (d0 + k >= width) break;
      A left[2];
      NORMALIGN_UNROLL
      for (int a = 0; a < 2; ++a)
        wmma::load_matrix_sync(left[a], &tile.points[0][row0 + 16 * a][k], P::pitch);
      NORMALIGN_UNROLL
      for (int b = 0; b < 4; ++b) {
        B right;
        wmma::load_matrix_sync(right, &tile.points[1][col0 + 16 * b][k], P::pitch);
        NORMALIGN_UNROLL
        for (int a = 0; a < 2; ++a) wmma::mma_sync(sums[a][b], left[a], right, sums[a][b]);
      }
    }
    float square = 0.0f;  // in an order that depends on the point alone
    NORMALIGN_UNROLL
    for (int d = 0; d < tensor_depth; d += pack) {
      const auto part = load_pack<pack>(&own[d]);
      NORMALIGN_UNROLL
      for (int e = 0; e < pack; ++e) square += P::value(part.v[e]) * P::value(part.v[e]);
    }
    norm += square;
    __syncthreads();  // these coordinates have been used
  }
  tile.norms[threadIdx.x / tensor_tile][threadIdx.x % tensor_tile] = norm;
  NORMALIGN_UNROLL
  for (int a = 0; a < 2; ++a) NORMALIGN_UNROLL
  for (int b = 0; b < 4; ++b)
    wmma::store_matrix_sync(&tile.products[row0 + 16 * a][col0 + 16 * b], sums[a][b],
                            tensor_tile + 4, wmma::mem_row_major);
  __syncthreads();
}

// Squared distances of the quarter from row and column of the tile on, 4 x 4 a thread as in
// distance_tile.cuh; those of near pairs by differences. x and z are its points.
template <class P>
__device__ __forceinline__ void quarter_distances(TensorTile<P>& tile, int row, int col,
                                                  const float* x, int64_t i0, int64_t m,
                                                  const float* z, int64_t j0, int64_t n, int width,
                                                  float (&squared)[4][4]) {
  row += threadIdx.x / 16 * 4;
  col += threadIdx.x % 16 * 4;
  unsigned near = 0;
  NORMALIGN_UNROLL
  for (int a = 0; a < 4; ++a) NORMALIGN_UNROLL
  for (int b = 0; b < 4; ++b) {
    const float sum = tile.norms[0][row + a] + tile.norms[1][col + b];
    squared[a][b] = sum - 2.0f * tile.products[row + a][col + b];
    if (is_near(squared[a][b], sum, P::near)) near |= 1u << (4 * a + b);
  }
  near_distances(tile.quarter, near, x, i0, m, z, j0, n, width, squared);
}

#endif

}  // namespace
}  // namespace normalign
