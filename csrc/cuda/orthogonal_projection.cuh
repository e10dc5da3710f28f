// r = g - (g.x / |x|^2) x and |r|^2, and their vector-Jacobian product, in one pass over memory.
// A group of threads (a warp, or a block of 256) has one row and keeps its part of it in registers
// between the reduction and the result: `packs` packs for each thread. Longer rows (packs = 0) are
// read twice, the second time from the cache.
#pragma once
#include "portable.cuh"

namespace normalign {
namespace {

constexpr int projection_threads = 256;

// Part of a row: pack p of thread t is at column (p * group + t) * width.
template <class T, int width, int group, int packs>
struct RowPart {
  Pack<T, width> pack[packs];

  __device__ __forceinline__ void load(const T* row, int64_t cols, int thread) {
    NORMALIGN_UNROLL
    for (int p = 0; p < packs; ++p) {
      const int64_t j = int64_t(p * group + thread) * width;
      if (j < cols)
        pack[p] = load_pack<width>(row + j);
      else
        NORMALIGN_UNROLL
      for (int k = 0; k < width; ++k) pack[p].v[k] = T(0);
    }
  }
};

template <class T, int group>
__device__ __forceinline__ T group_sum(T value, T* partial) {
  if constexpr (group == 32)
    return warp_sum(value);
  else
    return block_sum(value, partial);
}

template <class T>
__device__ __forceinline__ T ratio(T numerator, T denominator) {
  // Only an exact zero leaves the row alone: a NaN in x must reach the result.
  return denominator == T(0) ? T(0) : numerator / denominator;
}

template <class T, int width, int group, int packs>
__global__ void __launch_bounds__(projection_threads)
    projection_kernel(int64_t rows, int64_t cols, const T* __restrict__ g, int64_t g_stride,
                      const T* __restrict__ x, int64_t x_stride, T* __restrict__ r,
                      int64_t r_stride, T* __restrict__ squared_norm) {
  NORMALIGN_SHARED(T, partial, [projection_threads / 32]);
  const int thread = threadIdx.x % group;
  const int64_t row = int64_t(blockIdx.x) * (projection_threads / group) + threadIdx.x / group;
  if (row >= rows) return;  // whole warps, in kernels without a barrier
  g += row * g_stride;
  x += row * x_stride;
  r += row * r_stride;
  T gx = 0, xx = 0, sum = 0;
  if constexpr (packs > 0) {
    RowPart<T, width, group, packs> gs, xs;
    gs.load(g, cols, thread);
    xs.load(x, cols, thread);
    NORMALIGN_UNROLL
    for (int p = 0; p < packs; ++p) NORMALIGN_UNROLL
    for (int k = 0; k < width; ++k) {
      gx += gs.pack[p].v[k] * xs.pack[p].v[k];
      xx += xs.pack[p].v[k] * xs.pack[p].v[k];
    }
    const T scale = ratio(group_sum<T, group>(gx, partial), group_sum<T, group>(xx, partial));
    NORMALIGN_UNROLL
    for (int p = 0; p < packs; ++p) {
      Pack<T, width> out;
      const int64_t j = int64_t(p * group + thread) * width;
      if (j >= cols) continue;
      NORMALIGN_UNROLL
      for (int k = 0; k < width; ++k) {
        out.v[k] = gs.pack[p].v[k] - scale * xs.pack[p].v[k];
        sum += out.v[k] * out.v[k];
      }
      store_pack(r + j, out);
    }
  } else {
    for (int64_t j = int64_t(thread) * width; j < cols; j += group * width) {
      const auto gs = load_pack<width>(g + j), xs = load_pack<width>(x + j);
      NORMALIGN_UNROLL
      for (int k = 0; k < width; ++k) {
        gx += gs.v[k] * xs.v[k];
        xx += xs.v[k] * xs.v[k];
      }
    }
    const T scale = ratio(group_sum<T, group>(gx, partial), group_sum<T, group>(xx, partial));
    for (int64_t j = int64_t(thread) * width; j < cols; j += group * width) {
      const auto gs = load_pack<width>(g + j), xs = load_pack<width>(x + j);
      Pack<T, width> out;
      NORMALIGN_UNROLL
      for (int k = 0; k < width; ++k) {
        out.v[k] = gs.v[k] - scale * xs.v[k];
        sum += out.v[k] * out.v[k];
      }
      store_pack(r + j, out);
    }
  }
  sum = group_sum<T, group>(sum, partial);
  if (thread == 0) squared_norm[row] = sum;
}

// What the backward pass knows of a row. With h the cotangent of r and q that of |r|^2:
//   grad_g = h - (h.x / |x|^2) x + 2 q r,   grad_x = -s (h + 2 q r) - (h.x / |x|^2) (g - 2 s x).
template <class T>
struct ProjectionBackward {
  T s, hx, q2;

  __device__ __forceinline__ T grad_g(T g, T x, T h) const { return h - hx * x + q2 * (g - s * x); }
  __device__ __forceinline__ T grad_x(T g, T x, T h) const {
    return -s * (h + q2 * (g - s * x)) - hx * (g - T(2) * s * x);
  }
};

// grad_r, grad_squared_norm and grad_x may be null: zero, zero, not wanted.
template <class T, int width, int group, int packs>
__global__ void __launch_bounds__(projection_threads)
    projection_backward_kernel(int64_t rows, int64_t cols, const T* __restrict__ g,
                               int64_t g_stride, const T* __restrict__ x, int64_t x_stride,
                               const T* __restrict__ grad_r, int64_t grad_r_stride,
                               const T* __restrict__ grad_squared_norm, int64_t norm_stride,
                               T* __restrict__ grad_g, T* __restrict__ grad_x) {
  NORMALIGN_SHARED(T, partial, [projection_threads / 32]);
  const int thread = threadIdx.x % group;
  const int64_t row = int64_t(blockIdx.x) * (projection_threads / group) + threadIdx.x / group;
  if (row >= rows) return;
  g += row * g_stride;
  x += row * x_stride;
  const bool has_h = grad_r != nullptr;
  const T* h = has_h ? grad_r + row * grad_r_stride : g;
  ProjectionBackward<T> b;
  b.q2 = grad_squared_norm ? T(2) * grad_squared_norm[row * norm_stride] : T(0);
  T gx = 0, xx = 0, hx = 0;
  if constexpr (packs > 0) {
    RowPart<T, width, group, packs> gs, xs, hs;
    gs.load(g, cols, thread);
    xs.load(x, cols, thread);
    hs.load(h, has_h ? cols : 0, thread);
    NORMALIGN_UNROLL
    for (int p = 0; p < packs; ++p) NORMALIGN_UNROLL
    for (int k = 0; k < width; ++k) {
      gx += gs.pack[p].v[k] * xs.pack[p].v[k];
      xx += xs.pack[p].v[k] * xs.pack[p].v[k];
      hx += hs.pack[p].v[k] * xs.pack[p].v[k];
    }
    xx = group_sum<T, group>(xx, partial);
    b.s = ratio(group_sum<T, group>(gx, partial), xx);
    b.hx = ratio(group_sum<T, group>(hx, partial), xx);
    NORMALIGN_UNROLL
    for (int p = 0; p < packs; ++p) {
      const int64_t j = int64_t(p * group + thread) * width;
      if (j >= cols) continue;
      Pack<T, width> to_g, to_x;
      NORMALIGN_UNROLL
      for (int k = 0; k < width; ++k) {
        to_g.v[k] = b.grad_g(gs.pack[p].v[k], xs.pack[p].v[k], hs.pack[p].v[k]);
        to_x.v[k] = b.grad_x(gs.pack[p].v[k], xs.pack[p].v[k], hs.pack[p].v[k]);
      }
      store_pack(grad_g + row * cols + j, to_g);
      if (grad_x) store_pack(grad_x + row * cols + j, to_x);
    }
  } else {
    for (int64_t j = int64_t(thread) * width; j < cols; j += group * width) {
      const auto gs = load_pack<width>(g + j), xs = load_pack<width>(x + j);
      const auto hs = load_pack<width>(h + j);
      NORMALIGN_UNROLL
      for (int k = 0; k < width; ++k) {
        gx += gs.v[k] * xs.v[k];
        xx += xs.v[k] * xs.v[k];
        hx += hs.v[k] * xs.v[k];
      }
    }
    xx = group_sum<T, group>(xx, partial);
    b.s = ratio(group_sum<T, group>(gx, partial), xx);
    b.hx = has_h ? ratio(group_sum<T, group>(hx, partial), xx) : T(0);
    for (int64_t j = int64_t(thread) * width; j < cols; j += group * width) {
      const auto gs = load_pack<width>(g + j), xs = load_pack<width>(x + j);
      const auto hs = load_pack<width>(h + j);
      Pack<T, width> to_g, to_x;
      NORMALIGN_UNROLL
      for (int k = 0; k < width; ++k) {
        to_g.v[k] = b.grad_g(gs.v[k], xs.v[k], has_h ? hs.v[k] : T(0));
        to_x.v[k] = b.grad_x(gs.v[k], xs.v[k], has_h ? hs.v[k] : T(0));
      }
      store_pack(grad_g + row * cols + j, to_g);
      if (grad_x) store_pack(grad_x + row * cols + j, to_x);
    }
  }
}

}  // namespace
}  // namespace normalign
