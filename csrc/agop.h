// The average gradient outer product of f = K(., z) coef in factor space, up to constant factors:
//   R = sum_i weight_i sum_k h_ik h_ik^T,   h_ik = sum_j W_ij coef_jk (x_i - z_j)
// with W as in laplace_gram.h. `panels` hold the scaled points, `points` the same points row-major
// (unscaled). R comes as one double matrix for each thread (threads, width, width), to be added up.
// Three exact forms; none stores an array of n x n x c or, with few classes at a time, n x c x d.
#pragma once
#include "common.h"

namespace normalign {

template <class T>
struct AgopOf {
  // Symmetric tiles of W, made and used at once. values: 48 panels(n) ldq, sums: threads times
  // that, block: threads * (48 c + width) * ldr, where ldq and ldr are c (width + 1) and width
  // rounded up to 16.
  void (*tiles)(int kernel, T exponent, int64_t n, int64_t c, int64_t width, const T* panels,
                const T* points, const T* coef, int64_t ldc, const T* weight, T* values, T* sums,
                T* block, double* r, int threads);
  // Gradients at m other points. values as above (of z), sums: threads * 48 ldq.
  void (*streamed)(int kernel, T exponent, int64_t m, int64_t n, int64_t c, int64_t width,
                   const T* x_panels, const T* x, const T* z_panels, const T* z, const T* coef,
                   int64_t ldc, const T* weight, T* values, T* sums, T* block, double* r,
                   int threads);
  // n^3 whatever c and width: R = X^T B X, B from W, W diag(weight) W and coef. w: (48 panels)^2,
  // lanes: 2 c * 48 panels, rows: threads * (48 * 48 panels + 48 panels + 48 ldr + width ldr).
  // Returns sum_i B_ii |x_i|^2: B_ii collects the squares that gradients are sums of, so that this
  // over the trace of R tells how much of them cancelled.
  double (*gram)(int kernel, T exponent, int64_t n, int64_t c, int64_t width, const T* panels,
                 const T* points, const T* coef, int64_t ldc, const T* weight, T* w, T* lanes,
                 T* padded_points, T* rows, double* r, int threads);
};

struct AgopTable {
  AgopOf<float> f32;
  AgopOf<double> f64;
};

NORMALIGN_DECLARE_TABLES(AgopTable, agop);

}  // namespace normalign
