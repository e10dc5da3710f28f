// Many small systems (K + ridge I) a = y, on a GPU: a block each.
#pragma once
#include "launch.h"

namespace normalign {

// Arrays of all systems, contiguous; system b has its own order sizes[b] <= n, and rows and columns
// beyond it are neither read nor written.
template <class T>
struct GpuSystems {
  int count;
  int64_t n, c;
  const int* sizes;  // (count) or null: all n
  const T* ridge;    // (count) or null: 0
  T* k;              // (count, n, n): the lower triangle becomes L; above it nothing changes
  T* y;              // (count, c, n): right-hand sides, one a row; solved in place
  // (count, 3): 0, or 1 + the column whose pivot is not positive; the least pivot, 1 where there is
  // none; the greatest diagonal entry. Where a pivot failed, k and y hold nothing of use.
  T* info;
};

template <class T>
Status cholesky_solve_gpu(const GpuSystems<T>& systems, Stream stream);

}  // namespace normalign
