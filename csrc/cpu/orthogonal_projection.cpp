#include "orthogonal_projection.h"

#include "simd.h"

namespace normalign {
namespace {

template <class T>
void project_row(int64_t cols, const T* g, const T* x, T* r, T* squared_norm) {
  using V = typename Simd<T>::V;
  constexpr int W = Simd<T>::width;
  V gx0{}, gx1{}, xx0{}, xx1{};
  int64_t j = 0;
  for (; j + 2 * W <= cols; j += 2 * W) {
    const V x0 = load(x + j), x1 = load(x + j + W);
    gx0 += load(g + j) * x0;
    gx1 += load(g + j + W) * x1;
    xx0 += x0 * x0;
    xx1 += x1 * x1;
  }
  for (; j < cols; j += W) {
    const V x0 = load_n(x + j, cols - j);
    gx0 += load_n(g + j, cols - j) * x0;
    xx0 += x0 * x0;
  }
  const T xx = lane_sum<T>(xx0 + xx1);
  // Only an exact zero leaves the row alone: a NaN in x must reach the result.
  const T scale = xx == T(0) ? T(0) : lane_sum<T>(gx0 + gx1) / xx;
  V sum{};
  for (j = 0; j + W <= cols; j += W) {
    const V v = load(g + j) - scale * load(x + j);
    sum += v * v;
    store(r + j, v);
  }
  if (j < cols) {
    const V v = load_n(g + j, cols - j) - scale * load_n(x + j, cols - j);
    sum += v * v;
    store_n(r + j, v, cols - j);
  }
  *squared_norm = lane_sum<T>(sum);
}

template <class T>
void orthogonal_projection(int64_t rows, int64_t cols, const T* g, int64_t g_stride, const T* x,
                           int64_t x_stride, T* r, int64_t r_stride, T* squared_norm, int threads) {
  // Below this many elements, waking the other threads costs more than it saves.
  if (threads <= 1 || rows * cols < 32768) {
    for (int64_t i = 0; i < rows; ++i)
      project_row(cols, g + i * g_stride, x + i * x_stride, r + i * r_stride, squared_norm + i);
    return;
  }
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t i = 0; i < rows; ++i)
    project_row(cols, g + i * g_stride, x + i * x_stride, r + i * r_stride, squared_norm + i);
}

}  // namespace

extern const OrthogonalProjectionTable NORMALIGN_VARIANT(orthogonal_projection) = {
    orthogonal_projection<float>, orthogonal_projection<double>};

}  // namespace normalign
