#include "gram_tensor.cuh"

namespace normalign {

Status laplace_gram_tensor_gpu(GpuKernel<float> kernel, GpuBatch batch, bool bf16, int64_t m,
                               int64_t n, int width, const float* x, const float* z, float* out,
                               Stream stream) {
  if (width <= widest_differences)
    return laplace_gram_gpu<float>(kernel, batch, false, m, n, width, x, z, out, stream);
  const auto tiles = [](int64_t points) {
    return unsigned((points + tensor_tile - 1) / tensor_tile);
  };
  const dim3 grid(tiles(n), tiles(m), unsigned(batch.count));
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (bf16)
    NORMALIGN_LAUNCH(gram_tensor_kernel<true>, grid, dim3(laplace_threads),
                     sizeof(TensorTile<Bf16>), cuda_stream, kernel, batch, m, n, width, x, z, out);
  else
    NORMALIGN_LAUNCH(gram_tensor_kernel<false>, grid, dim3(laplace_threads),
                     sizeof(TensorTile<Tf32>), cuda_stream, kernel, batch, m, n, width, x, z, out);
  return launch_status();
}

}  // namespace normalign
