// Elementary functions of csrc/cpu/vecmath.h over arrays, so that tests reach them.
#pragma once
#include "common.h"

namespace normalign {

enum class Elementary { exp = 0, exp2 = 1, sqrt = 2, log2 = 3 };

struct ElementaryTable {
  void (*f32)(Elementary function, int64_t n, const float* x, float* y);
  void (*f64)(Elementary function, int64_t n, const double* x, double* y);
};

NORMALIGN_DECLARE_TABLES(ElementaryTable, elementary);

}  // namespace normalign
