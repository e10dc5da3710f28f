#include "launch.h"
#include "orthogonal_projection.cuh"

namespace normalign {
namespace {

template <class T, int width, int group, int packs, class... Args>
void launch_projection(int64_t rows, Stream stream, Args... args) {
  const dim3 grid(unsigned((rows * group + projection_threads - 1) / projection_threads));
  NORMALIGN_LAUNCH((projection_kernel<T, width, group, packs>), grid, dim3(projection_threads), 0,
                   static_cast<cudaStream_t>(stream), rows, args...);
}

template <class T, int width, int group, int packs, class... Args>
void launch_backward(int64_t rows, Stream stream, Args... args) {
  const dim3 grid(unsigned((rows * group + projection_threads - 1) / projection_threads));
  NORMALIGN_LAUNCH((projection_backward_kernel<T, width, group, packs>), grid,
                   dim3(projection_threads), 0, static_cast<cudaStream_t>(stream), rows, args...);
}

// A warp for each row as long as its registers hold the row, then a block, then a block that reads
// the row twice.
template <class T, int width, class... Args>
void choose_projection(int64_t rows, int64_t cols, Stream stream, Args... args) {
  if (cols <= 32 * 2 * width)
    launch_projection<T, width, 32, 2>(rows, stream, cols, args...);
  else if (cols <= 32 * 8 * width)
    launch_projection<T, width, 32, 8>(rows, stream, cols, args...);
  else if (cols <= 256 * 2 * width)
    launch_projection<T, width, 256, 2>(rows, stream, cols, args...);
  else
    launch_projection<T, width, 256, 0>(rows, stream, cols, args...);
}

template <class T, int width, class... Args>
void choose_backward(int64_t rows, int64_t cols, Stream stream, Args... args) {
  if (cols <= 32 * 2 * width)
    launch_backward<T, width, 32, 2>(rows, stream, cols, args...);
  else if (cols <= 32 * 8 * width)
    launch_backward<T, width, 32, 8>(rows, stream, cols, args...);
  else if (cols <= 256 * 2 * width)
    launch_backward<T, width, 256, 2>(rows, stream, cols, args...);
  else
    launch_backward<T, width, 256, 0>(rows, stream, cols, args...);
}

}  // namespace

template <class T>
Status projection_gpu(int64_t rows, int64_t cols, const T* g, int64_t g_stride, const T* x,
                      int64_t x_stride, T* r, int64_t r_stride, T* squared_norm, Stream stream) {
  if (cols % wide<T> == 0 && rows_are_wide(g, g_stride) && rows_are_wide(x, x_stride) &&
      rows_are_wide(r, r_stride))
    choose_projection<T, wide<T>>(rows, cols, stream, g, g_stride, x, x_stride, r, r_stride,
                                  squared_norm);
  else
    choose_projection<T, 1>(rows, cols, stream, g, g_stride, x, x_stride, r, r_stride,
                            squared_norm);
  return launch_status();
}

template <class T>
Status projection_backward_gpu(int64_t rows, int64_t cols, const T* g, int64_t g_stride, const T* x,
                               int64_t x_stride, const T* grad_r, int64_t grad_r_stride,
                               const T* grad_squared_norm, int64_t norm_stride, T* grad_g,
                               T* grad_x, Stream stream) {
  if (cols % wide<T> == 0 && rows_are_wide(g, g_stride) && rows_are_wide(x, x_stride) &&
      rows_are_wide(grad_r, grad_r_stride) && rows_are_wide(grad_g, cols) &&
      rows_are_wide(grad_x, cols))
    choose_backward<T, wide<T>>(rows, cols, stream, g, g_stride, x, x_stride, grad_r, grad_r_stride,
                                grad_squared_norm, norm_stride, grad_g, grad_x);
  else
    choose_backward<T, 1>(rows, cols, stream, g, g_stride, x, x_stride, grad_r, grad_r_stride,
                          grad_squared_norm, norm_stride, grad_g, grad_x);
  return launch_status();
}

#define NORMALIGN_INSTANCE(T)                                                                   \
  template Status projection_gpu<T>(int64_t, int64_t, const T*, int64_t, const T*, int64_t, T*, \
                                    int64_t, T*, Stream);                                       \
  template Status projection_backward_gpu<T>(int64_t, int64_t, const T*, int64_t, const T*,     \
                                             int64_t, const T*, int64_t, const T*, int64_t, T*, \
                                             T*, Stream)
NORMALIGN_INSTANCE(float);
NORMALIGN_INSTANCE(double);
#undef NORMALIGN_INSTANCE

}  // namespace normalign
