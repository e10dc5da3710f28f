// See agop.h. A block takes a few rows x and a group of classes through all points z: a tile of
// gradient weights W, then W_ij coef_jk (z_j - x_i) added to the gradients in registers. Relative
// to the own point, because W is as large as 1 / D where that difference is small: sums of W z and
// of W would cancel. At the end the gradients pass through shared memory, and g g^T is added up.
#pragma once
#include "agop.h"
#include "kernel_value.cuh"

namespace normalign {
namespace {

constexpr int agop_threads = 256;
constexpr int agop_tile = 128;     // points z at a time
constexpr int agop_held = 4 * 4;   // gradient entries of a thread, for each of its classes
constexpr int agop_row_group = 4;  // rows of a thread
// Of a block, at most: coefficients and gradients are in shared memory, of which every GPU from
// sm_80 on has 99 KiB for 8 rows. Two more classes take 100 in fp64 at 29 to 32 coordinates.
template <class T>
constexpr int agop_classes = sizeof(T) == 8 ? 30 : 32;

// Who does what in a block. A thread has 4 rows, 4 coordinates (a quad) and `kept` classes, for
// every `parts`-th point z; threads with the same rows are lane 0, 1, ...
struct AgopPlan {
  int quads;    // of 4 coordinates, the last one padded with zeros
  int pitch;    // of points in shared memory: an odd number of 16-byte units spares bank conflicts
  int classes;  // of a block
  int groups;   // of classes: blocks that share rows
  int slots;    // of `kept` classes
  int parts;
};

template <int rows>
constexpr int agop_lanes = agop_threads / (rows / agop_row_group);
template <class T, int rows>
constexpr int agop_weight_pitch = rows + wide<T>;  // odd too

template <class T, int rows, int kept>
inline AgopPlan agop_plan(int width, int c) {
  AgopPlan plan;
  plan.quads = (width + 3) / 4;
  plan.pitch = (plan.quads * 4 / wide<T> | 1) * wide<T>;
  int most = agop_lanes<rows> / plan.quads * kept;
  if (most > agop_classes<T>) most = agop_classes<T>;
  plan.groups = (c + most - 1) / most;
  plan.classes = (c + plan.groups - 1) / plan.groups;
  plan.slots = (plan.classes + kept - 1) / kept;
  plan.parts = agop_lanes<rows> / (plan.quads * plan.slots);
  return plan;
}

// Bytes of shared memory: of the arrays while points pass, of those afterwards.
template <class T, int rows, int kept>
inline int64_t agop_bytes(const AgopPlan& plan) {
  const int64_t points = (agop_tile + rows) * plan.pitch +
                         agop_tile * (agop_weight_pitch<T, rows> + plan.slots * kept);
  const int64_t gradients = agop_threads * agop_held + rows * plan.classes * plan.pitch;
  const int64_t totals = agop_threads * agop_held * int64_t(sizeof(double));
  const int64_t bytes = (points > gradients ? points : gradients) * int64_t(sizeof(T));
  return bytes > totals ? bytes : totals;
}

// `count` rows of `width` elements, `stride` apart, to rows of `pitch`.
template <class T>
__device__ __forceinline__ void load_agop_rows(const T* from, int64_t stride, int64_t count,
                                               int width, T* to, int pitch) {
  const int down = agop_threads / width, right = agop_threads % width;
  int64_t row = threadIdx.x / width;
  int col = threadIdx.x % width;
  while (row < count) {
    to[row * pitch + col] = from[row * stride + col];
    row += down;
    col += right;
    if (col >= width) {
      col -= width;
      ++row;
    }
  }
}

// Columns first .. last - 1 of rows of `pitch`.
template <class T>
__device__ __forceinline__ void clear_columns(T* rows, int count, int pitch, int first, int last) {
  const int cols = last - first;
  for (int e = threadIdx.x; e < count * cols; e += agop_threads)
    rows[e / cols * pitch + first + e % cols] = T(0);
}

// W of `rows` points x and `points` points z, rows next to each other; 0 for rows from `valid` on.
template <class T, int rows>
__device__ __forceinline__ void agop_weights(GpuKernel<T> kernel, const T* x, const T* z, int pitch,
                                             int coordinates, int valid, int points, T* weights) {
  constexpr int lanes = agop_lanes<rows>, across = agop_tile / lanes;
  constexpr int weight_pitch = agop_weight_pitch<T, rows>;
  const int lane = threadIdx.x % lanes, row0 = threadIdx.x / lanes * agop_row_group;
  T squared[agop_row_group][across] = {};
  NORMALIGN_LOOP
  for (int t = 0; t < coordinates; t += wide<T>) {
    Pack<T, wide<T>> v[across];
    NORMALIGN_UNROLL
    for (int e = 0; e < across; ++e) v[e] = load_pack<wide<T>>(z + (lane + lanes * e) * pitch + t);
    NORMALIGN_UNROLL
    for (int a = 0; a < agop_row_group; ++a) {
      const auto u = load_pack<wide<T>>(x + (row0 + a) * pitch + t);
      NORMALIGN_UNROLL
      for (int e = 0; e < across; ++e) NORMALIGN_UNROLL
      for (int w = 0; w < wide<T>; ++w) {
        const T difference = u.v[w] - v[e].v[w];
        squared[a][e] += difference * difference;
      }
    }
  }
  NORMALIGN_UNROLL
  for (int e = 0; e < across; ++e) NORMALIGN_UNROLL
  for (int a = 0; a < agop_row_group; a += wide<T>) {
    Pack<T, wide<T>> own;
    NORMALIGN_UNROLL
    for (int w = 0; w < wide<T>; ++w) own.v[w] = squared[a + w][e];
    store_pack(weights + (lane + lanes * e) * weight_pitch + row0 + a, own);
  }
  // Each thread goes on with its own entries. A loop, because copies of the exponential would fill
  // the registers.
  constexpr int packs = agop_row_group / wide<T>;
  NORMALIGN_LOOP
  for (int e = 0; e < across * packs; ++e) {
    const int j = lane + lanes * (e / packs), i = row0 + e % packs * wide<T>;
    T* const at = weights + j * weight_pitch + i;
    auto own = load_pack<wide<T>>(at);
    NORMALIGN_UNROLL
    for (int w = 0; w < wide<T>; ++w)
      own.v[w] = j < points && i + w < valid ? kernel_weight(kernel, own.v[w]) : T(0);
    store_pack(at, own);
  }
}

// Sums of g g^T over `count` rows g of `pitch`, to out (width, width), or added to it.
template <class T>
__device__ __forceinline__ void add_outer_products(const T* g, int count, int pitch, int quads,
                                                   int width, double* shared, bool add,
                                                   double* out) {
  const int tiles = quads * quads, parts = agop_threads / tiles;
  const int tile = threadIdx.x % tiles, part = threadIdx.x / tiles;
  double sum[4][4] = {};
  if (part < parts) {
    const T* const left = g + tile / quads * 4;
    const T* const right = g + tile % quads * 4;
    for (int row = part; row < count; row += parts) {
      double u[4], v[4];
      NORMALIGN_UNROLL
      for (int s = 0; s < 4; s += wide<T>) {
        const auto p = load_pack<wide<T>>(left + row * pitch + s);
        const auto q = load_pack<wide<T>>(right + row * pitch + s);
        NORMALIGN_UNROLL
        for (int w = 0; w < wide<T>; ++w) {
          u[s + w] = double(p.v[w]);
          v[s + w] = double(q.v[w]);
        }
      }
      NORMALIGN_UNROLL
      for (int s = 0; s < 4; ++s) NORMALIGN_UNROLL
      for (int t = 0; t < 4; ++t) sum[s][t] += u[s] * v[t];
    }
  }
  __syncthreads();  // the rows have been read, and their memory takes the sums
  if (part < parts) {
    NORMALIGN_UNROLL
    for (int s = 0; s < 4; ++s) NORMALIGN_UNROLL
    for (int t = 0; t < 4; ++t) shared[(4 * s + t) * agop_threads + threadIdx.x] = sum[s][t];
  }
  __syncthreads();
  for (int e = threadIdx.x; e < width * width; e += agop_threads) {
    const int s = e / width, t = e % width;
    const double* const from = shared + (s % 4 * 4 + t % 4) * agop_threads + s / 4 * quads + t / 4;
    double total = add ? out[e] : 0.0;
    for (int p = 0; p < parts; ++p) total += from[p * tiles];
    out[e] = total;
  }
  __syncthreads();
}

// blockIdx.x is a part of the rows, .y a group of classes, .z a problem.
template <class T, int rows, int kept>
__global__ void __launch_bounds__(agop_threads, 2)
    agop_kernel(const GpuAgop<T> k, const AgopPlan plan) {
  constexpr int lanes = agop_lanes<rows>, weight_pitch = agop_weight_pitch<T, rows>;
  NORMALIGN_DYNAMIC_SHARED(double, memory);
  // While points z pass: both sets of points, W, coefficients. Afterwards, in the same place: what
  // the parts of the points add up to, and the gradients.
  const int width = k.width, pitch = plan.pitch, coefs = plan.slots * kept;
  T* const x = reinterpret_cast<T*>(memory);
  T* const z = x + rows * pitch;
  T* const weights = z + agop_tile * pitch;
  T* const coef = weights + agop_tile * weight_pitch;
  T* const sums = reinterpret_cast<T*>(memory);
  T* const g = sums + agop_threads * agop_held;

  const int64_t problem = blockIdx.z;
  const int64_t n = k.batch.own_n ? k.batch.own_n[problem] : k.n;
  const int64_t m = n == 0 ? 0 : k.batch.own_m ? k.batch.own_m[problem] : k.m;
  const T* const all_x = k.x + problem * k.m * width;
  const T* const all_z = k.z + problem * k.n * width;
  const int class0 = blockIdx.y * plan.classes;
  const int classes = k.c - class0 < plan.classes ? k.c - class0 : plan.classes;
  const T* const all_coef = k.coef + problem * k.n * k.c + class0;
  double* const out =
      k.out +
      ((blockIdx.y * int64_t(gridDim.x) + blockIdx.x) * k.batch.count + problem) * (width * width);

  const int lane = threadIdx.x % lanes, row0 = threadIdx.x / lanes * agop_row_group;
  const int places = plan.quads * plan.slots;  // of the lanes that share points z
  const int part = lane / places, place = lane % places;
  const int slot = place / plan.quads, quad = place % plan.quads;
  bool begun = false;
  for (int64_t i0 = int64_t(blockIdx.x) * rows; i0 < m; i0 += int64_t(gridDim.x) * rows) {
    const int valid = m - i0 < rows ? int(m - i0) : rows;
    clear_columns(z, agop_tile, pitch, width, plan.quads * 4);
    clear_columns(coef, agop_tile, coefs, classes, coefs);
    clear_columns(x, rows, pitch, width, plan.quads * 4);
    clear_columns(x + valid * pitch, rows - valid, pitch, 0, width);
    load_agop_rows(all_x + i0 * width, width, valid, width, x, pitch);
    T sum[kept][agop_row_group][4] = {};
    for (int64_t j0 = 0; j0 < n; j0 += agop_tile) {
      const int points = n - j0 < agop_tile ? int(n - j0) : agop_tile;
      load_agop_rows(all_z + j0 * width, width, points, width, z, pitch);
      load_agop_rows(all_coef + j0 * k.c, k.c, points, classes, coef, coefs);
      __syncthreads();
      agop_weights<T, rows>(k.kernel, x, z, pitch, plan.quads * 4, valid, points, weights);
      __syncthreads();
      T origin[agop_row_group][4];  // read again each time: W needs the registers
      NORMALIGN_UNROLL
      for (int a = 0; a < agop_row_group; ++a) NORMALIGN_UNROLL
      for (int t = 0; t < 4; ++t) origin[a][t] = x[(row0 + a) * pitch + quad * 4 + t];
      NORMALIGN_LOOP
      for (int j = part < plan.parts ? part : points; j < points; j += plan.parts) {
        T weight[agop_row_group], value[4];
        NORMALIGN_UNROLL
        for (int s = 0; s < 4; s += wide<T>) {
          const auto p = load_pack<wide<T>>(weights + j * weight_pitch + row0 + s);
          const auto q = load_pack<wide<T>>(z + j * pitch + quad * 4 + s);
          NORMALIGN_UNROLL
          for (int w = 0; w < wide<T>; ++w) {
            weight[s + w] = p.v[w];
            value[s + w] = q.v[w];
          }
        }
        T factor[kept];
        NORMALIGN_UNROLL
        for (int q = 0; q < kept; ++q) factor[q] = coef[j * coefs + slot * kept + q];
        NORMALIGN_UNROLL
        for (int a = 0; a < agop_row_group; ++a) NORMALIGN_UNROLL
        for (int t = 0; t < 4; ++t) {
          const T difference = value[t] - origin[a][t];
          NORMALIGN_UNROLL
          for (int q = 0; q < kept; ++q) sum[q][a][t] += weight[a] * factor[q] * difference;
        }
      }
      __syncthreads();
    }
    // What the parts have, one class of each slot at a time.
    NORMALIGN_UNROLL
    for (int q = 0; q < kept; ++q) {
      const int held = rows * places * 4;
      if (part < plan.parts) {
        NORMALIGN_UNROLL
        for (int a = 0; a < agop_row_group; ++a) NORMALIGN_UNROLL
        for (int t = 0; t < 4; ++t)
          sums[part * held + ((row0 + a) * places + place) * 4 + t] = sum[q][a][t];
      }
      __syncthreads();
      for (int e = threadIdx.x; e < held; e += agop_threads) {
        const int row = e / (4 * places), own = e / 4 % places * 4 + e % 4;
        const int own_class = own / (4 * plan.quads) * kept + q;
        if (own_class >= classes) continue;
        T total = T(0);
        for (int p = 0; p < plan.parts; ++p) total += sums[p * held + e];
        if (k.weight && row < valid)
          total = T(double(total) * sqrt(k.weight[problem * k.m + i0 + row]));
        g[(row * classes + own_class) * pitch + own % (4 * plan.quads)] = total;
      }
      __syncthreads();
    }
    add_outer_products(g, valid * classes, pitch, plan.quads, width, memory, begun, out);
    begun = true;
  }
  if (begun) return;
  for (int e = threadIdx.x; e < width * width; e += agop_threads) out[e] = 0.0;
}

}  // namespace
}  // namespace normalign
