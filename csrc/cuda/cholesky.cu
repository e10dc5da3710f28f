#include "cholesky.cuh"

namespace normalign {

template <class T>
Status cholesky_solve_gpu(const GpuSystems<T>& systems, Stream stream) {
  NORMALIGN_LAUNCH((cholesky_kernel<T>), dim3(unsigned(systems.count)), dim3(cholesky_threads), 0,
                   static_cast<cudaStream_t>(stream), systems);
  return launch_status();
}

// Systems of kernels are solved in float64 alone.
template Status cholesky_solve_gpu<double>(const GpuSystems<double>&, Stream);

}  // namespace normalign
