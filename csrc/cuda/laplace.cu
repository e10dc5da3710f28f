#include "laplace.cuh"

namespace normalign {
namespace {

unsigned tiles_of(int64_t n) {
  return unsigned((n + laplace_tile - 1) / laplace_tile);
}

template <class T, bool weights, bool products>
Status launch_gram(GpuKernel<T> kernel, GpuBatch batch, int64_t m, int64_t n, int width, const T* x,
                   const T* z, T* out, cudaStream_t stream) {
  const dim3 grid(tiles_of(n), tiles_of(m), unsigned(batch.count));
  NORMALIGN_LAUNCH((gram_kernel<T, weights, products>), grid, dim3(laplace_threads), 0, stream,
                   kernel, batch, m, n, width, x, z, out);
  return launch_status();
}

template <class T, Sum kind>
Status launch_stream(GpuKernel<T> kernel, GpuBatch batch, int64_t m, int64_t n, int width, int c,
                     int parts, const T* x, const T* z, const T* coef, const T* cotangent, T* out,
                     Stream stream) {
  const int results = kind == Sum::outputs ? c : kind == Sum::gradient ? width : c * width;
  const int ranges = (results + kept_cols - 1) / kept_cols;
  const dim3 grid(tiles_of(m), unsigned(parts), unsigned(ranges * batch.count));
  NORMALIGN_LAUNCH((stream_kernel<T, kind>), grid, dim3(laplace_threads), 0,
                   static_cast<cudaStream_t>(stream), kernel, batch, m, n, width, c, x, z, coef,
                   cotangent, out);
  return launch_status();
}

}  // namespace

template <class T>
Status laplace_gram_gpu(GpuKernel<T> kernel, GpuBatch batch, bool weights, int64_t m, int64_t n,
                        int width, const T* x, const T* z, T* out, Stream stream) {
  const bool products = width > widest_differences;
  const auto launch = weights ? products ? launch_gram<T, true, true> : launch_gram<T, true, false>
                      : products ? launch_gram<T, false, true>
                                 : launch_gram<T, false, false>;
  return launch(kernel, batch, m, n, width, x, z, out, static_cast<cudaStream_t>(stream));
}

template <class T>
Status laplace_matvec_gpu(GpuKernel<T> kernel, GpuBatch batch, int64_t m, int64_t n, int width,
                          int c, int parts, const T* x, const T* z, const T* coef, T* out,
                          Stream stream) {
  return launch_stream<T, Sum::outputs>(kernel, batch, m, n, width, c, parts, x, z, coef, coef, out,
                                        stream);
}

template <class T>
Status laplace_gradient_gpu(GpuKernel<T> kernel, GpuBatch batch, int64_t m, int64_t n, int width,
                            int c, int parts, const T* x, const T* z, const T* coef,
                            const T* cotangent, T* out, Stream stream) {
  return launch_stream<T, Sum::gradient>(kernel, batch, m, n, width, c, parts, x, z, coef,
                                         cotangent, out, stream);
}

template <class T>
Status laplace_jacobian_gpu(GpuKernel<T> kernel, GpuBatch batch, int64_t m, int64_t n, int width,
                            int c, int parts, const T* x, const T* z, const T* coef, T* out,
                            Stream stream) {
  return launch_stream<T, Sum::jacobian>(kernel, batch, m, n, width, c, parts, x, z, coef, coef,
                                         out, stream);
}

template <class T>
Status project_gpu(int count, int64_t m, int d, int width, const int* table, const double* x,
                   const double* factor, T* out, Stream stream) {
  const dim3 grid(unsigned((m * width + laplace_threads - 1) / laplace_threads), unsigned(count));
  NORMALIGN_LAUNCH((project_kernel<T>), grid, dim3(laplace_threads), 0,
                   static_cast<cudaStream_t>(stream), m, d, width, table, x, factor, out);
  return launch_status();
}

#define NORMALIGN_INSTANCE(T)                                                                      \
  template Status laplace_gram_gpu<T>(GpuKernel<T>, GpuBatch, bool, int64_t, int64_t, int,         \
                                      const T*, const T*, T*, Stream);                             \
  template Status laplace_matvec_gpu<T>(GpuKernel<T>, GpuBatch, int64_t, int64_t, int, int, int,   \
                                        const T*, const T*, const T*, T*, Stream);                 \
  template Status laplace_gradient_gpu<T>(GpuKernel<T>, GpuBatch, int64_t, int64_t, int, int, int, \
                                          const T*, const T*, const T*, const T*, T*, Stream);     \
  template Status laplace_jacobian_gpu<T>(GpuKernel<T>, GpuBatch, int64_t, int64_t, int, int, int, \
                                          const T*, const T*, const T*, T*, Stream)
NORMALIGN_INSTANCE(float);
NORMALIGN_INSTANCE(double);
#undef NORMALIGN_INSTANCE
// Points enter factor space in float64.
template Status project_gpu<double>(int, int64_t, int, int, const int*, const double*,
                                    const double*, double*, Stream);

}  // namespace normalign
