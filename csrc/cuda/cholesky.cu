#include "cholesky.cuh"
#include "semidefinite.cuh"

namespace normalign {

template <class T>
Status cholesky_solve_gpu(const GpuSystems<T>& systems, Stream stream) {
  NORMALIGN_LAUNCH((cholesky_kernel<T>), dim3(unsigned(systems.count)), dim3(cholesky_threads), 0,
                   static_cast<cudaStream_t>(stream), systems);
  return launch_status();
}

template <class T>
Status semidefinite_factor_gpu(const GpuSemidefinite<T>& matrices, Stream stream) {
  NORMALIGN_LAUNCH((semidefinite_kernel<T>), dim3(unsigned(matrices.count)), dim3(cholesky_threads),
                   0, static_cast<cudaStream_t>(stream), matrices);
  return launch_status();
}

// Systems of kernels are solved in float64 alone, and features are updated in it.
template Status cholesky_solve_gpu<double>(const GpuSystems<double>&, Stream);
template Status semidefinite_factor_gpu<double>(const GpuSemidefinite<double>&, Stream);

}  // namespace normalign
