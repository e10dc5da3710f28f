// Gram matrices of float32 points with tensor cores: see laplace.h.
#pragma once
#include <type_traits>

#include "distance_tensor.cuh"
#include "laplace.cuh"

namespace normalign {
namespace {

// A block makes 128 x 128 entries of K. Where there are no tensor cores of these types it must not
// be launched.
template <bool bf16>
__global__ void __launch_bounds__(laplace_threads, 2)
    gram_tensor_kernel(GpuKernel<float> k, GpuBatch batch, int64_t m, int64_t n, int width,
                       const float* x, const float* z, float* out) {
#if defined(NORMALIGN_TENSOR_CORES)
  using P = std::conditional_t<bf16, Bf16, Tf32>;
  NORMALIGN_DYNAMIC_SHARED(TensorTile<P>, tile);
  const GramProblem<float> p(batch, m, n, width, x, z, out);
  if (p.symmetric && blockIdx.x < blockIdx.y) return;  // the mirror tile writes this one
  const int64_t i0 = int64_t(blockIdx.y) * tensor_tile, j0 = int64_t(blockIdx.x) * tensor_tile;
  if (i0 >= p.m || j0 >= p.n) return;
  tensor_products(*tile, p.x, i0, p.m, p.z, j0, p.n, width);
  NORMALIGN_LOOP
  for (int quarter = 0; quarter < 4; ++quarter) {
    const int row = quarter / 2 * laplace_tile, col = quarter % 2 * laplace_tile;
    const int64_t i1 = i0 + row, j1 = j0 + col;
    if (i1 >= p.m || j1 >= p.n || (p.symmetric && j1 < i1)) continue;
    float squared[4][4];
    quarter_distances(*tile, row, col, p.x, i1, p.m, p.z, j1, p.n, width, squared);
    make_entries(tile->quarter, squared, [&](int, int, float s) { return kernel_value(k, s); });
    write_entries(tile->quarter, i1, p.m, j1, p.n, p.symmetric && i1 != j1, p.out, p.stride);
    __syncthreads();  // these entries have been written
  }
#else
  __trap();
#endif
}

}  // namespace
}  // namespace normalign
