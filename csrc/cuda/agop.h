// The average gradient outer product on a GPU, in factor spaces of at most 64 coordinates: in one
// launch from points to sums of g g^T, for many problems at once, without an array of gradients.
#pragma once
#include "laplace.h"

namespace normalign {

constexpr int agop_widest = 64;

// Passed to the kernel by value. Arrays are contiguous; m points x and n points z of each problem,
// c classes. Points beyond a problem's own (see GpuBatch) are not read.
template <class T>
struct GpuAgop {
  GpuKernel<T> kernel;
  GpuBatch batch;
  int64_t m, n;
  int width, c;
  const T* x;            // (count, m, width)
  const T* z;            // (count, n, width)
  const T* coef;         // (count, n, c)
  const double* weight;  // (count, m), or null: 1
  // (parts, count, width, width): sum_ik weight_i g_ik g_ik^T over a part of the rows and classes,
  // where g_ik = sum_j W_ij coef_jk (z_j - x_i). Parts without rows are 0. The sum over j is in T,
  // that over i and k in float64.
  double* out;
};

// How many parts a launch with these sizes makes on the current device.
template <class T>
int64_t agop_parts(int count, int64_t m, int width, int c);

template <class T>
Status agop_gpu(const GpuAgop<T>& agop, Stream stream);

}  // namespace normalign
