#include "attack.cuh"

namespace normalign {
namespace {

constexpr int few_rows = 2, many_rows = 8;
constexpr int64_t full_gpu = 264;  // blocks

template <class T, int rows>
void launch_attack(const GpuAttack<T>& k, cudaStream_t stream) {
  const dim3 grid(unsigned((k.m + rows - 1) / rows), unsigned(k.machines * k.radii));
  const auto bytes = rows * attack_row_elements(k.n, k.c, k.d, k.r) * int64_t(sizeof(T));
  NORMALIGN_LAUNCH((attack_kernel<T, rows>), grid, dim3(attack_threads), bytes, stream, k);
}

}  // namespace

bool attack_fits(int n, int c, int d, int r, int64_t element) {
  return few_rows * attack_row_elements(n, c, d, r) * element <= shared_limit();
}

template <class T>
Status attack_gpu(const GpuAttack<T>& k, Stream stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  // Eight points share every read of a training point; two fill the GPU where points are few.
  const int64_t blocks = (k.m + many_rows - 1) / many_rows * k.machines * k.radii;
  const int64_t bytes = many_rows * attack_row_elements(k.n, k.c, k.d, k.r) * int64_t(sizeof(T));
  if (blocks >= full_gpu && bytes <= shared_limit())
    launch_attack<T, many_rows>(k, on);
  else
    launch_attack<T, few_rows>(k, on);
  return launch_status();
}

template Status attack_gpu<float>(const GpuAttack<float>&, Stream);
template Status attack_gpu<double>(const GpuAttack<double>&, Stream);

}  // namespace normalign
