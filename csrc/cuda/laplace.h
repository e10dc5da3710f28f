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

// K (m, n), or where `weights` the gradient weights W = q (D / L)^(q - 2) K / L^2, 0 at D = 0.
// With z = x and m = n only tiles on and above the diagonal are computed.
template <class T>
Status laplace_gram_gpu(GpuKernel<T> kernel, bool weights, int64_t m, int64_t n, int width,
                        const T* x, const T* z, T* out, Stream stream);

// Sums over the points z of one part of n each, `parts` of them: (parts, m, c).
// out_ik = sum_j K_ij coef_jk.
template <class T>
Status laplace_matvec_gpu(GpuKernel<T> kernel, int64_t m, int64_t n, int width, int c, int parts,
                          const T* x, const T* z, const T* coef, T* out, Stream stream);

// The gradient of sum_k cotangent_ik f_k(x_i) in x_i, in such parts: (parts, m, width).
template <class T>
Status laplace_gradient_gpu(GpuKernel<T> kernel, int64_t m, int64_t n, int width, int c, int parts,
                            const T* x, const T* z, const T* coef, const T* cotangent, T* out,
                            Stream stream);

}  // namespace normalign
