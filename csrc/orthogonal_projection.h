// r_i = g_i - (g_i . x_i / |x_i|^2) x_i and |r_i|^2, row by row.
// g, x, r are row-major with any row stride (in elements); columns are contiguous. A row with
// x = 0 is copied. Rows do not depend on each other, so the thread count changes no bit.
#pragma once
#include "common.h"

namespace normalign {

struct OrthogonalProjectionTable {
  void (*f32)(int64_t rows, int64_t cols, const float* g, int64_t g_stride, const float* x,
              int64_t x_stride, float* r, int64_t r_stride, float* squared_norm, int threads);
  void (*f64)(int64_t rows, int64_t cols, const double* g, int64_t g_stride, const double* x,
              int64_t x_stride, double* r, int64_t r_stride, double* squared_norm, int threads);
};

NORMALIGN_DECLARE_TABLES(OrthogonalProjectionTable, orthogonal_projection);

}  // namespace normalign
