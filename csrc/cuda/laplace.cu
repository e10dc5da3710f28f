#include "laplace.cuh"

namespace normalign {
namespace {

unsigned tiles_of(int64_t n) {
  return unsigned((n + laplace_tile - 1) / laplace_tile);
}

template <class T, bool weights, bool products>
Status launch_gram(GpuKernel<T> kernel, int64_t m, int64_t n, int width, const T* x, const T* z,
                   T* out, cudaStream_t stream) {
  const dim3 grid(tiles_of(n), tiles_of(m));
  NORMALIGN_LAUNCH((gram_kernel<T, weights, products>), grid, dim3(laplace_threads), 0, stream,
                   kernel, m, n, width, x, z, out);
  return launch_status();
}

template <class T, bool gradient>
Status launch_stream(GpuKernel<T> kernel, int64_t m, int64_t n, int width, int c, int parts,
                     const T* x, const T* z, const T* coef, const T* cotangent, T* out,
                     Stream stream) {
  const int results = gradient ? width : c;
  const dim3 grid(tiles_of(m), unsigned(parts), unsigned((results + kept_cols - 1) / kept_cols));
  NORMALIGN_LAUNCH((stream_kernel<T, gradient>), grid, dim3(laplace_threads), 0,
                   static_cast<cudaStream_t>(stream), kernel, m, n, width, c, x, z, coef, cotangent,
                   out);
  return launch_status();
}

}  // namespace

template <class T>
Status laplace_gram_gpu(GpuKernel<T> kernel, bool weights, int64_t m, int64_t n, int width,
                        const T* x, const T* z, T* out, Stream stream) {
  const bool products = width > widest_differences;
  const auto launch = weights ? products ? launch_gram<T, true, true> : launch_gram<T, true, false>
                      : products ? launch_gram<T, false, true>
                                 : launch_gram<T, false, false>;
  return launch(kernel, m, n, width, x, z, out, static_cast<cudaStream_t>(stream));
}

template <class T>
Status laplace_matvec_gpu(GpuKernel<T> kernel, int64_t m, int64_t n, int width, int c, int parts,
                          const T* x, const T* z, const T* coef, T* out, Stream stream) {
  return launch_stream<T, false>(kernel, m, n, width, c, parts, x, z, coef, nullptr, out, stream);
}

template <class T>
Status laplace_gradient_gpu(GpuKernel<T> kernel, int64_t m, int64_t n, int width, int c, int parts,
                            const T* x, const T* z, const T* coef, const T* cotangent, T* out,
                            Stream stream) {
  return launch_stream<T, true>(kernel, m, n, width, c, parts, x, z, coef, cotangent, out, stream);
}

#define NORMALIGN_INSTANCE(T)                                                                      \
  template Status laplace_gram_gpu<T>(GpuKernel<T>, bool, int64_t, int64_t, int, const T*,         \
                                      const T*, T*, Stream);                                       \
  template Status laplace_matvec_gpu<T>(GpuKernel<T>, int64_t, int64_t, int, int, int, const T*,   \
                                        const T*, const T*, T*, Stream);                           \
  template Status laplace_gradient_gpu<T>(GpuKernel<T>, int64_t, int64_t, int, int, int, const T*, \
                                          const T*, const T*, const T*, T*, Stream)
NORMALIGN_INSTANCE(float);
NORMALIGN_INSTANCE(double);
#undef NORMALIGN_INSTANCE

}  // namespace normalign
