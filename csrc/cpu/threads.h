// The number of the calling thread within its team.
#pragma once
#include "simd.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace normalign {
namespace {

NORMALIGN_INLINE int thread_index() {
#if defined(_OPENMP)
  return omp_get_thread_num();
#else
  return 0;
#endif
}

}  // namespace
}  // namespace normalign
