// Launchers of the CUDA kernels. Device addresses, sizes in elements, a stream: nothing is
// allocated and nothing waits, so every launch can be captured in a graph. Compiled by nvcc into
// _cuda and by the host compiler, against csrc/emu, into _emu. They return null, or what CUDA says
// went wrong.
#pragma once
#include <cstdint>

namespace normalign {

using Stream = void*;
using Status = const char*;

// See csrc/orthogonal_projection.h for the layout.
template <class T>
Status projection_gpu(int64_t rows, int64_t cols, const T* g, int64_t g_stride, const T* x,
                      int64_t x_stride, T* r, int64_t r_stride, T* squared_norm, Stream stream);

// grad_r, grad_squared_norm and grad_x may be null. grad_g and grad_x are contiguous.
template <class T>
Status projection_backward_gpu(int64_t rows, int64_t cols, const T* g, int64_t g_stride, const T* x,
                               int64_t x_stride, const T* grad_r, int64_t grad_r_stride,
                               const T* grad_squared_norm, int64_t norm_stride, T* grad_g,
                               T* grad_x, Stream stream);

}  // namespace normalign
