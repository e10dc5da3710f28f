// Kernels exp(-(D / L)^q) between points in factor space, where D is Euclidean, on a GPU. Points
// are row-major and contiguous. Distances are sums of squared differences: K_ii is 1 exactly, and
// points far from the origin lose nothing. For K and W of more than 32 coordinates that holds for
// near pairs alone; others take products (distance_tile.cuh says how near, and the error).
#pragma once
#include "launch.h"

namespace normalign {

template <class T>
struct GpuKernel {
  T exponent;  // q
  T inverse;   // 1 / L
};

// How many problems one launch has, each with arrays of the same shape one after another. Problem p
// has own_m[p] <= m points x and own_n[p] <= n points z; null means all. Points beyond are not
// read.
struct GpuBatch {
  int count;
  const int *own_m, *own_n;
};

// K (count, m, n), or where `weights` the gradient weights W = q (D / L)^(q - 2) K / L^2, 0 at D =
// 0; entries of points that do not exist are left as they are. With z = x and m = n only tiles on
// and above the diagonal are computed.
template <class T>
Status laplace_gram_gpu(GpuKernel<T> kernel, GpuBatch batch, bool weights, int64_t m, int64_t n,
                        int width, const T* x, const T* z, T* out, Stream stream);

// K of float32 points whose products, above 32 coordinates, have factors rounded to tf32 or bf16:
// distance_tensor.cuh has the error. Needs code for sm_80 or later. Defined in gram_tensor.cu.
Status laplace_gram_tensor_gpu(GpuKernel<float> kernel, GpuBatch batch, bool bf16, int64_t m,
                               int64_t n, int width, const float* x, const float* z, float* out,
                               Stream stream);

// The following are sums over the points z of one part of n each, `parts` of them; 0 for points x
// that do not exist.
// (parts, count, m, c): f_ik = sum_j K_ij coef_jk.
template <class T>
Status laplace_matvec_gpu(GpuKernel<T> kernel, GpuBatch batch, int64_t m, int64_t n, int width,
                          int c, int parts, const T* x, const T* z, const T* coef, T* out,
                          Stream stream);

// (parts, count, m, width): the gradient of sum_k cotangent_ik f_k(x_i) in x_i.
template <class T>
Status laplace_gradient_gpu(GpuKernel<T> kernel, GpuBatch batch, int64_t m, int64_t n, int width,
                            int c, int parts, const T* x, const T* z, const T* coef,
                            const T* cotangent, T* out, Stream stream);

// (parts, count, m, c, width): the gradient of every f_k.
template <class T>
Status laplace_jacobian_gpu(GpuKernel<T> kernel, GpuBatch batch, int64_t m, int64_t n, int width,
                            int c, int parts, const T* x, const T* z, const T* coef, T* out,
                            Stream stream);

// Points in factor space, u = x F, (count, m, width): problem p takes table[p] of the centred
// points x (tables, m, d), and its own factor (count, d, width). Equal points give equal results.
template <class T>
Status project_gpu(int count, int64_t m, int d, int width, const int* table, const double* x,
                   const double* factor, T* out, Stream stream);

}  // namespace normalign
