// Cholesky factorisation A = L L^T of a matrix whose lower triangle is packed in panels of 48 rows:
// panel I is [k][48], k = 0 .. 48 (I + 1) - 1, at element 48^2 I (I + 1) / 2; element [k][i] is
// A[48 I + i, k]. That is n^2 / 2 + O(n) elements, and the layout that the inner product wants.
#pragma once
#include "common.h"

namespace normalign {

template <class T>
struct CholeskyOf {
  // The lower triangle of row-major a (n, n), plus `shift` on the diagonal, into `packed`. Points
  // that fill the last panel get the identity.
  void (*pack)(int64_t n, const T* a, int64_t lda, T shift, T* packed, int threads);
  // In place. inverse: 48 panels elements, the reciprocals of L's diagonal. pivots[0 .. 1]: the
  // least and the greatest pivot among the first n. Returns 0, or k + 1 where pivot k fails.
  int64_t (*factor)(int64_t n, T* packed, T* inverse, T* pivots, int threads);
  // rhs (48 panels, stride) row-major with stride at least c, padded to whole vectors: solved in
  // place. Rows beyond n must be 0.
  void (*solve)(int64_t n, int64_t c, const T* packed, const T* inverse, T* rhs, int64_t stride);
};

struct CholeskyTable {
  CholeskyOf<float> f32;
  CholeskyOf<double> f64;
};

NORMALIGN_DECLARE_TABLES(CholeskyTable, cholesky);

}  // namespace normalign
