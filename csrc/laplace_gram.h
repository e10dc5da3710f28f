// Kernels exp(-(D / L)^q) between points in factor space, where D is Euclidean.
//
// Points come in panels of 48 (see csrc/cpu/point_panel.h), `panels(n) * width * 48` elements, with
// coordinates scaled such that, s being the squared distance,
//   laplace   K = 2^-sqrt(s)                  scale log2(e) / L
//   gaussian  K = 2^-s (q = 2)                scale sqrt(log2(e)) / L
//   power     K = 2^(-log2(e) s^(q/2))        scale 1 / L
// and the gradient weight W = -K'(D) / D up to a constant: K / sqrt(s), K, K s^(q/2) / s; 0 at s =
// 0.
#pragma once
#include "common.h"

namespace normalign {

template <class T>
struct LaplaceOf {
  // panels from row-major x (n, width), row stride ldx
  void (*pack)(int64_t n, int64_t width, const T* x, int64_t ldx, T scale, T* panels, int threads);
  // row-major K (weights = false) or W (m, n) of points x against z
  void (*gram)(int kernel, T exponent, bool weights, int64_t m, int64_t n, int64_t width,
               const T* x, const T* z, T* out, int64_t ldo, int threads);
  // K of one set of points, lower triangle, in the layout of csrc/cholesky.h, plus a diagonal:
  // ridge[i] where ridge is given, and `shift`. Points that fill the last panel have K_ii = 1.
  void (*gram_packed)(int kernel, T exponent, int64_t n, int64_t width, const T* x, const T* ridge,
                      T shift, T* packed, int threads);
  // out (m, c) = K(x, z) coef, coef (n, c) with row stride ldc. workspace: threads * 48 * c.
  void (*matvec)(int kernel, T exponent, int64_t m, int64_t n, int64_t c, int64_t width, const T* x,
                 const T* z, const T* coef, int64_t ldc, T* out, int64_t ldo, T* workspace,
                 int threads);
  // The same for z = x, at half the cost. coef and out (48 panels(n), stride), row-major, stride a
  // multiple of 16; rows beyond n of coef are 0. workspace: threads * 48 * (panels(n) stride + c)
  void (*matvec_symmetric)(int kernel, T exponent, int64_t n, int64_t c, int64_t width, const T* x,
                           const T* coef, T* out, int64_t stride, T* workspace, int threads);
};

struct LaplaceTable {
  LaplaceOf<float> f32;
  LaplaceOf<double> f64;
};

NORMALIGN_DECLARE_TABLES(LaplaceTable, laplace_gram);

}  // namespace normalign
