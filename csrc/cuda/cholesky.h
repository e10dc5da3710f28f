// Many small symmetric matrices on a GPU, a block each: systems (K + ridge I) a = y, and factors of
// semi-definite matrices. What fails is dealt with there and then: no host has to look.
#pragma once
#include "launch.h"

namespace normalign {

constexpr int longest_ladder = 12;

// Arrays of all systems, contiguous; system b has its own order sizes[b] <= n, and what lies beyond
// is not read.
template <class T>
struct GpuSystems {
  int count;
  int64_t n, c;
  const int* sizes;          // (count) or null: all n
  const T* ridge;            // (count) or null: 0
  int steps;                 // of the ladder
  T ladder[longest_ladder];  // what to add to the diagonal, in turn, until a factorisation succeeds
  T* k;              // (count, n, n): the lower triangle becomes L; above it nothing changes
  const T* targets;  // (count, c, n): right-hand sides, one a row
  T* y;              // (count, c, n): work space
  T* diagonal;       // (count, n): work space
  T* coef;           // (count, n, c): solutions, 0 beyond the system, NaN where none was found
  T* jitter;         // (count): what was added; NaN where nothing helped
};

template <class T>
Status cholesky_solve_gpu(const GpuSystems<T>& systems, Stream stream);

// Matrices R of orders ranks[b] <= n, 0 beyond, and C with C C^T = R.
template <class T>
struct GpuSemidefinite {
  int count;
  int64_t n;
  int* ranks;   // (count): in, the order of R; out, how many columns of C are not 0, the first ones
  T* r;         // (count, n, n), symmetric; lost
  T* diagonal;  // (count, n): work space
  T* factor;    // (count, n, n): C; the identity, and no change of the rank, where R = 0; NaN, and
                // no change either, where R holds NaN or infinity
};

template <class T>
Status semidefinite_factor_gpu(const GpuSemidefinite<T>& matrices, Stream stream);

}  // namespace normalign
