// Kernels of the small stacks: see stack.h.
#pragma once
#include "activation.cuh"
#include "stack_loss.cuh"

namespace normalign {
namespace {

constexpr int stack_threads = 256;
constexpr int stack_warps = stack_threads / 32;
constexpr int depth_step = 8;  // terms of a sum whose weights are loaded at once

// Rows in shared memory are padded with zeros to whole steps.
__host__ __device__ __forceinline__ int padded(int cols) {
  return (cols + depth_step - 1) / depth_step * depth_step;
}

// The product of the block's rows, in shared memory, with a matrix (depth, cols), into `out`: a
// thread has one column and all rows, so neighbouring threads read neighbouring weights, each once.
template <class T, int block_rows>
__device__ __forceinline__ void product(const T* rows, int depth, const T* __restrict__ matrix,
                                        int cols, T* out) {
  const int pitch = padded(depth);
  for (int j = threadIdx.x; j < cols; j += stack_threads) {
    T sum[block_rows] = {};
    for (int k0 = 0; k0 < depth; k0 += depth_step) {
      T w[depth_step];
      NORMALIGN_UNROLL
      for (int k = 0; k < depth_step; ++k)
        w[k] = k0 + k < depth ? matrix[int64_t(k0 + k) * cols + j] : T(0);
      NORMALIGN_UNROLL
      for (int r = 0; r < block_rows; ++r) NORMALIGN_UNROLL
      for (int k = 0; k < depth_step; k += wide<T>) {
        const auto v = load_pack<wide<T>>(rows + r * pitch + k0 + k);
        NORMALIGN_UNROLL
        for (int i = 0; i < wide<T>; ++i) sum[r] += v.v[i] * w[k + i];
      }
    }
    NORMALIGN_UNROLL
    for (int r = 0; r < block_rows; ++r) out[r * padded(cols) + j] = sum[r];
  }
  __syncthreads();
}

// For few columns: a warp has a row, its lanes share each sum. `weight` is (cols, depth).
template <class T, int block_rows>
__device__ __forceinline__ void narrow_product(const T* rows, int depth,
                                               const T* __restrict__ weight, int cols, T* out) {
  const int lane = threadIdx.x % 32;
  for (int r = threadIdx.x / 32; r < block_rows; r += stack_warps)
    for (int j = 0; j < cols; ++j) {
      T sum = T(0);
      for (int k = lane; k < depth; k += 32)
        sum += rows[r * padded(depth) + k] * weight[int64_t(j) * depth + k];
      sum = warp_sum(sum);
      if (lane == 0) out[r * padded(cols) + j] = sum;
    }
  __syncthreads();
}
constexpr int narrow_cols = 16;

// Replaces each entry v of the block's rows by make(row, column, v), and what lies outside by zero.
template <class T, int block_rows, class Make>
__device__ __forceinline__ void transform(T* rows, int cols, int64_t valid, Make make) {
  const int lane = threadIdx.x % 32, pitch = padded(cols);
  for (int r = threadIdx.x / 32; r < block_rows; r += stack_warps)
    for (int j = lane; j < pitch; j += 32)
      rows[r * pitch + j] = r < valid && j < cols ? make(r, j, rows[r * pitch + j]) : T(0);
  __syncthreads();
}

// The block's rows of a matrix, into shared memory; what lies outside is zero.
template <class T, int block_rows>
__device__ __forceinline__ void load_rows(const T* from, int64_t stride, int64_t valid, int cols,
                                          T* to) {
  const int lane = threadIdx.x % 32, pitch = padded(cols);
  for (int r = threadIdx.x / 32; r < block_rows; r += stack_warps)
    for (int j = lane; j < pitch; j += 32)
      to[r * pitch + j] = from && r < valid && j < cols ? from[r * stride + j] : T(0);
  __syncthreads();
}

// W^T of every layer that is not narrow, so that products towards the output read along rows too.
constexpr int transpose_tile = 32;
template <class T>
__global__ void __launch_bounds__(stack_threads) stack_transpose_kernel(const GpuStack<T> k) {
  if (k.finished && blockIdx.x == 0 && threadIdx.x == 0) *k.finished = 0;
  NORMALIGN_SHARED(T, buffer, [transpose_tile][transpose_tile + 1]);
  int layer = 0, tile = blockIdx.x, across = 0;
  for (;; ++layer) {
    across = (k.width[layer] + transpose_tile - 1) / transpose_tile;
    const int tiles = across * ((k.width[layer + 1] + transpose_tile - 1) / transpose_tile);
    if (tile < tiles) break;
    tile -= tiles;
  }
  const int ins = k.width[layer], outs = k.width[layer + 1];
  const int i0 = tile % across * transpose_tile, o0 = tile / across * transpose_tile;
  const int x = threadIdx.x % transpose_tile;
  for (int y = threadIdx.x / transpose_tile; y < transpose_tile; y += stack_warps)
    if (o0 + y < outs && i0 + x < ins)
      buffer[y][x] = k.weight[layer][int64_t(o0 + y) * ins + i0 + x];
  __syncthreads();
  for (int y = threadIdx.x / transpose_tile; y < transpose_tile; y += stack_warps)
    if (i0 + y < ins && o0 + x < outs)
      k.transposed[layer][int64_t(i0 + y) * outs + o0 + x] = buffer[x][y];
}

template <class T>
__device__ __forceinline__ Activated<T> behind(const GpuStack<T>& k, int l, T z) {
  return activated(k.activation[l - 1], k.p0[l - 1], k.p1[l - 1], z);
}

template <class T, int block_rows>
__device__ __forceinline__ void to_output(const GpuStack<T>& k, int l, const T* rows, T* out) {
  const int cols = k.width[l + 1];
  if (cols <= narrow_cols)
    narrow_product<T, block_rows>(rows, k.width[l], k.weight[l], cols, out);
  else
    product<T, block_rows>(rows, k.width[l], k.transposed[l], cols, out);
}

template <class T>
__device__ __forceinline__ void exchange(T*& a, T*& b) {
  T* const other = a;
  a = b;
  b = other;
}

// Projects the block's rows g off the rows x, each warp its own; adds |r|^2 to norm.
template <class T, int warp_rows>
__device__ __forceinline__ void project_rows(const GpuStack<T>& k, T* rows, const T* x,
                                             int64_t valid, T* residual, T* norm) {
  const int lane = threadIdx.x % 32, d = k.width[0], pitch = padded(d);
  NORMALIGN_UNROLL
  for (int i = 0; i < warp_rows; ++i) {
    const int r = threadIdx.x / 32 + i * stack_warps;
    T* const row = rows + r * pitch;
    T gx = T(0), xx = T(0), sum = T(0);
    if (k.project && r < valid)
      for (int j = lane; j < d; j += 32) {
        const T v = x[r * k.x_stride + j];
        gx += row[j] * v;
        xx += v * v;
      }
    gx = warp_sum(gx);
    xx = warp_sum(xx);
    // Only an exact zero leaves the row alone: a NaN in x must reach the result.
    const T scale = xx == T(0) ? T(0) : gx / xx;
    for (int j = lane; j < pitch; j += 32) {
      const bool inside = r < valid && j < d;
      T v = inside ? row[j] : T(0);
      if (k.project && inside) v -= scale * x[r * k.x_stride + j];
      sum += v * v;
      row[j] = v;
      if (k.tangent && inside) residual[int64_t(r) * d + j] = v;
    }
    norm[i] += warp_sum(sum);
  }
  __syncthreads();
}

template <class T, int block_rows>
__global__ void __launch_bounds__(stack_threads, 1)
    stack_forward_kernel(const GpuStack<T> k, int widest) {
  NORMALIGN_DYNAMIC_SHARED(T, memory);
  T* in = memory;
  T* out = memory + block_rows * widest;
  const int64_t row0 = int64_t(blockIdx.x) * block_rows;
  const int64_t valid = k.batch - row0 < block_rows ? k.batch - row0 : block_rows;
  const int last = k.layers;
  const T* const x = k.x + row0 * k.x_stride;

  load_rows<T, block_rows>(x, k.x_stride, valid, k.width[0], in);
  for (int l = 1; l <= last; ++l) {
    const int cols = k.width[l];
    const T* const bias = k.bias[l - 1];
    to_output<T, block_rows>(k, l - 1, in, out);
    transform<T, block_rows>(out, cols, valid, [&](int r, int j, T z) {
      const int64_t at = (row0 + r) * cols + j;
      if (bias) z += bias[j];
      if (l == last) {
        k.logits[at] = z;
        return z;
      }
      const T a = behind(k, l, z).value;
      k.z[l][at] = z;
      k.a[l][at] = a;
      return a;
    });
    exchange(in, out);
  }

  constexpr int warp_rows = block_rows / stack_warps;
  if (k.criterion != StackCriterion::none) {
    NORMALIGN_LOOP
    for (int r = threadIdx.x / 32; r < valid; r += stack_warps) {
      const int64_t sample = row0 + r;
      const T loss = row_loss(k, sample, in + r * padded(k.width[last]),
                              k.task_gradient + sample * k.width[last]);
      if (threadIdx.x % 32 == 0) k.task[sample] = loss;
    }
    __syncthreads();
  }
  T norm[warp_rows] = {};
  for (int p = 0; p < k.probes; ++p) {
    const int64_t first = p * k.batch + row0;
    load_rows<T, block_rows>(k.probe + first * k.width[last], k.width[last], valid, k.width[last],
                             in);
    for (int l = last - 1; l >= 0; --l) {
      const int cols = k.width[l];
      product<T, block_rows>(in, k.width[l + 1], k.weight[l], cols, out);
      exchange(in, out);
      if (l == 0) break;
      transform<T, block_rows>(in, cols, valid, [&](int r, int j, T u) {
        const int64_t at = (first + r) * cols + j;
        const T s = u * behind(k, l, k.z[l][(row0 + r) * cols + j]).slope;
        k.s[l][at] = s;
        if (k.u[l]) k.u[l][at] = u;
        return s;
      });
    }
    project_rows<T, warp_rows>(k, in, x, valid, k.t[0] + first * k.width[0], norm);
    for (int l = 1; l < last && k.tangent; ++l) {
      const int cols = k.width[l];
      to_output<T, block_rows>(k, l - 1, in, out);
      exchange(in, out);
      transform<T, block_rows>(in, cols, valid, [&](int r, int j, T q) {
        const int64_t sample = (row0 + r) * cols + j, at = (first + r) * cols + j;
        const auto f = behind(k, l, k.z[l][sample]);
        k.t[l][at] = q * f.slope;
        if (k.u[l]) {
          const T term = f.bend * q * k.u[l][at];
          k.cross[l][sample] = p == 0 ? term : k.cross[l][sample] + term;
        }
        return q * f.slope;
      });
    }
  }
  NORMALIGN_UNROLL
  for (int i = 0; i < warp_rows; ++i) {
    const int r = threadIdx.x / 32 + i * stack_warps;
    if (threadIdx.x % 32 == 0 && r < valid && k.probes > 0)
      k.penalty[row0 + r] = norm[i] / T(k.probes);
  }
  if (k.mean_penalty) means_by_the_last_block<T, stack_threads>(k);
}

template <class T>
__device__ __forceinline__ T penalty_factor(const T* grad, int64_t stride, T scale, int64_t i) {
  return grad ? scale * grad[i * stride] : T(0);
}

// delta of every hidden layer: phi'(z) W^T delta, plus what the penalty adds through phi''.
template <class T, int block_rows>
__global__ void __launch_bounds__(stack_threads, 1)
    stack_backward_kernel(const GpuStack<T> k, int widest) {
  NORMALIGN_DYNAMIC_SHARED(T, memory);
  T* in = memory;
  T* out = memory + block_rows * widest;
  const int64_t row0 = int64_t(blockIdx.x) * block_rows;
  const int64_t valid = k.batch - row0 < block_rows ? k.batch - row0 : block_rows;
  const int last = k.layers, outputs = k.width[last];
  load_rows<T, block_rows>(k.grad_logits ? k.grad_logits + row0 * outputs : nullptr, outputs, valid,
                           outputs, in);
  const T factor = logits_factor(k);
  for (int l = last - 1; l >= 1; --l) {
    const int cols = k.width[l];
    product<T, block_rows>(in, k.width[l + 1], k.weight[l], cols, out);
    exchange(in, out);
    transform<T, block_rows>(in, cols, valid, [&](int r, int j, T sum) {
      const int64_t at = (row0 + r) * cols + j;
      T delta = sum * behind(k, l, k.z[l][at]).slope;
      if (l == last - 1) delta *= factor;
      if (k.u[l] && k.grad_penalty)
        delta +=
            penalty_factor(k.grad_penalty, k.grad_penalty_stride, k.grad_penalty_scale, row0 + r) *
            k.cross[l][at];
      k.delta[l][at] = delta;
      return delta;
    });
  }
}

// ---- weight gradients: delta^T a + sum over probes of (factor s)^T t, for all layers at once.
// A block makes one tile of grad_tile x grad_tile; its four groups of 64 threads each sum a quarter
// of the rows, 4 x 4 results a thread.
constexpr int grad_tile = 32;
constexpr int grad_pitch = grad_tile + 4;  // rows stay 16-byte aligned
constexpr int grad_rows = 32;              // rows in shared memory at a time
constexpr int grad_groups = 4;

template <class T>
__global__ void __launch_bounds__(stack_threads) stack_weight_kernel(const GpuStack<T> k) {
  NORMALIGN_SHARED(T, left, [grad_rows][grad_pitch]);
  NORMALIGN_SHARED(T, right, [grad_rows][grad_pitch]);
  NORMALIGN_SHARED(T, total, [grad_tile][grad_pitch]);
  NORMALIGN_SHARED(T, bias_total, [grad_tile]);
  int layer = 0, tile = blockIdx.x, tiles_in = 0;
  for (; layer < k.layers; ++layer) {
    tiles_in = (k.width[layer] + grad_tile - 1) / grad_tile;
    const int tiles = tiles_in * ((k.width[layer + 1] + grad_tile - 1) / grad_tile);
    if (tile < tiles) break;
    tile -= tiles;
  }
  const int ins = k.width[layer], outs = k.width[layer + 1];
  const int in0 = tile % tiles_in * grad_tile, out0 = tile / tiles_in * grad_tile;
  const bool top = layer + 1 == k.layers;
  const T* const delta = top ? k.grad_logits : k.delta[layer + 1];
  const T* const s = top ? k.probe : k.s[layer + 1];
  const T* const a = layer == 0 ? k.x : k.a[layer];
  const int64_t a_stride = layer == 0 ? k.x_stride : ins;
  const int group = threadIdx.x / 64, i0 = threadIdx.x % 64 / 8 * 4, j0 = threadIdx.x % 8 * 4;
  T sum[4][4] = {}, bias[4] = {};
  const T top_factor = top ? logits_factor(k) : T(1);
  // Without a gradient of the penalty only the task's rows count.
  const int64_t rows = k.batch * (k.grad_penalty ? 1 + k.probes : 1);
  for (int64_t row0 = 0; row0 < rows; row0 += grad_rows) {
    __syncthreads();
    NORMALIGN_UNROLL
    for (int i = 0; i < grad_rows * grad_tile / stack_threads; ++i) {
      const int e = threadIdx.x + i * stack_threads, r = e / grad_tile, c = e % grad_tile;
      const int64_t row = row0 + r;
      T l = T(0), m = T(0);
      if (row < k.batch) {
        if (delta && out0 + c < outs) l = top_factor * delta[row * outs + out0 + c];
        if (in0 + c < ins) m = a[row * a_stride + in0 + c];
      } else if (row < rows) {
        const int64_t at = row - k.batch;
        const T factor = penalty_factor(k.grad_penalty, k.grad_penalty_stride, k.grad_penalty_scale,
                                        at % k.batch);
        if (out0 + c < outs) l = factor * s[at * outs + out0 + c];
        if (in0 + c < ins) m = k.t[layer][at * ins + in0 + c];
      }
      left[r][c] = l;
      right[r][c] = m;
    }
    __syncthreads();
    NORMALIGN_UNROLL
    for (int q = 0; q < grad_rows / grad_groups; ++q) {
      const int r = group * (grad_rows / grad_groups) + q;
      T l[4], m[4];
      NORMALIGN_UNROLL
      for (int c = 0; c < 4; ++c) {
        l[c] = left[r][i0 + c];
        m[c] = right[r][j0 + c];
      }
      NORMALIGN_UNROLL
      for (int i = 0; i < 4; ++i) {
        NORMALIGN_UNROLL
        for (int j = 0; j < 4; ++j) sum[i][j] += l[i] * m[j];
        bias[i] += row0 + r < k.batch ? l[i] : T(0);
      }
    }
  }
  // The groups add up one after the other: the same order every time.
  for (int g = 0; g < grad_groups; ++g) {
    if (group == g) {
      NORMALIGN_UNROLL
      for (int i = 0; i < 4; ++i) {
        NORMALIGN_UNROLL
        for (int j = 0; j < 4; ++j) {
          T& to = total[i0 + i][j0 + j];
          to = g == 0 ? sum[i][j] : to + sum[i][j];
        }
        if (j0 == 0) bias_total[i0 + i] = g == 0 ? bias[i] : bias_total[i0 + i] + bias[i];
      }
    }
    __syncthreads();
  }
  for (int e = threadIdx.x; e < grad_tile * grad_tile; e += stack_threads) {
    const int i = e / grad_tile, j = e % grad_tile;
    if (k.grad_weight[layer] && out0 + i < outs && in0 + j < ins)
      k.grad_weight[layer][int64_t(out0 + i) * ins + in0 + j] = total[i][j];
    if (k.grad_bias[layer] && j == 0 && in0 == 0 && out0 + i < outs)
      k.grad_bias[layer][out0 + i] = bias_total[i];
  }
}

// ---- between library products
template <class T, Stage stage>
__global__ void __launch_bounds__(stack_threads, 1) stage_kernel(const GpuStage<T> k) {
  const int64_t size = k.batch * k.cols, step = int64_t(gridDim.x) * stack_threads;
  for (int64_t i = int64_t(blockIdx.x) * stack_threads + threadIdx.x; i < size; i += step) {
    if constexpr (stage == Stage::forward) {
      const T z = k.bias ? k.in[i] + k.bias[i % k.cols] : k.in[i];
      k.in[i] = z;
      k.out[i] = activated(k.activation, k.p0, k.p1, z).value;
      continue;
    }
    const auto f = activated(k.activation, k.p0, k.p1, k.z[i]);
    if constexpr (stage == Stage::backward) {
      T delta = f.slope * k.in[i];
      if (k.cross && k.grad_penalty)
        delta += penalty_factor(k.grad_penalty, k.grad_penalty_stride, k.grad_penalty_scale,
                                i / k.cols) *
                 k.cross[i];
      k.out[i] = delta;
    } else {
      T cross = T(0);
      NORMALIGN_LOOP
      for (int64_t p = 0; p < k.probes; ++p) {
        const T in = k.in[p * size + i];
        k.out[p * size + i] = f.slope * in;
        if (stage == Stage::tangent && k.u) cross += f.bend * in * k.u[p * size + i];
      }
      if (stage == Stage::tangent && k.u) k.cross[i] = cross;
    }
  }
}

}  // namespace
}  // namespace normalign
