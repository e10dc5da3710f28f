#include "elementary.h"

#include "cpu/vecmath.h"

namespace normalign {
namespace {

template <class T>
void elementary(Elementary function, int64_t n, const T* x, T* y) {
  constexpr int W = Simd<T>::width;
  for (int64_t i = 0; i < n; i += W) {
    const auto v = load_n(x + i, n - i);
    const auto r = function == Elementary::exp    ? vexp<T>(v)
                   : function == Elementary::exp2 ? vexp2<T>(v)
                   : function == Elementary::log2 ? vlog2<T>(v)
                                                  : vsqrt(v);
    store_n(y + i, r, n - i);
  }
}

}  // namespace

extern const ElementaryTable NORMALIGN_VARIANT(elementary) = {elementary<float>,
                                                              elementary<double>};

}  // namespace normalign
