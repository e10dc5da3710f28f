// The only include that a kernel file needs: CUDA under nvcc, the host machine of csrc/emu
// otherwise. Kernels keep to what both have: barriers, full-warp shuffles and ballots, shared
// memory through the macros below, atomicAdd.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)

#include <cuda_runtime.h>

#define NORMALIGN_UNROLL _Pragma("unroll")
#define NORMALIGN_LOOP _Pragma("unroll 1")  // stays a loop
// NORMALIGN_SHARED(float, tile, [32][33]);
#define NORMALIGN_SHARED(T, name, dims) __shared__ T name dims
#define NORMALIGN_DYNAMIC_SHARED(T, name)                                   \
  extern __shared__ __align__(32) unsigned char normalign_dynamic_shared[]; \
  T* const name = reinterpret_cast<T*>(normalign_dynamic_shared)
// More than 48 KiB of dynamic shared memory has to be allowed for each kernel.
#define NORMALIGN_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                         \
  do {                                                                                           \
    if ((shared_bytes) > 48 * 1024)                                                              \
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (shared_bytes)); \
    kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__);                                  \
  } while (0)

// Null, or what CUDA says about the launches since the last call.
static inline const char* launch_status() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Bytes of shared memory that a block may have on the current device: 99, 163 or 227 KiB.
static inline int64_t shared_limit() {
  int device = 0, bytes = 48 << 10;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return bytes;
}

#else

#include "../emu/device.h"

static inline const char* launch_status() {
  return nullptr;
}  // the machine throws

static inline int64_t shared_limit() {
  return ::normalign::emu::shared_limit();
}

#define NORMALIGN_UNROLL
#define NORMALIGN_LOOP
#define NORMALIGN_SHARED(T, name, dims)                                             \
  using name##_type = T dims;                                                       \
  static ::normalign::emu::SharedSlot name##_slot{sizeof(name##_type), nullptr, 0}; \
  name##_type& name = *reinterpret_cast<name##_type*>(::normalign::emu::shared(name##_slot))
#define NORMALIGN_DYNAMIC_SHARED(T, name) \
  T* const name = static_cast<T*>(::normalign::emu::dynamic_shared())
#define NORMALIGN_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                  \
  do {                                                                                    \
    const dim3 grid_ = grid, block_ = block;                                              \
    ::normalign::emu::launch({grid_.x, grid_.y, grid_.z}, {block_.x, block_.y, block_.z}, \
                             (shared_bytes), stream, [&] { kernel(__VA_ARGS__); });       \
  } while (0)

#endif

namespace normalign {
namespace {

template <class T>
__device__ __forceinline__ T warp_sum(T value) {
  NORMALIGN_UNROLL
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffffffffu, value, lanes);
  return value;
}

// The sum over a block of up to 1024 threads, the same bits in every thread. `partial` holds one
// value for each warp and may be used again afterwards.
template <class T>
__device__ __forceinline__ T block_sum(T value, T* partial) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = (blockDim.x + 31) / 32;
  value = warp_sum(value);
  if (lane == 0) partial[warp] = value;
  __syncthreads();
  value = warp_sum(lane < warps ? partial[lane] : T(0));
  __syncthreads();
  return value;
}

// A product and a sum that are rounded each, as torch's are: never one fused operation.
__device__ __forceinline__ double multiply_rounded(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}
__device__ __forceinline__ double add_rounded(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dadd_rn(a, b);
#else
  return a + b;
#endif
}

// Values that a thread loads and stores at once: 16 bytes where the address allows it.
template <class T>
constexpr int wide = 16 / sizeof(T);

template <class T, int width>
struct alignas(sizeof(T) * width) Pack {
  T v[width];
};

template <int width, class T>
__device__ __forceinline__ Pack<T, width> load_pack(const T* p) {
  return *reinterpret_cast<const Pack<T, width>*>(p);
}

template <class T, int width>
__device__ __forceinline__ void store_pack(T* p, Pack<T, width> pack) {
  *reinterpret_cast<Pack<T, width>*>(p) = pack;
}

// Whether every row of this array starts at a 16-byte address.
template <class T>
inline bool rows_are_wide(const T* p, int64_t stride) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0 && stride % wide<T> == 0;
}

}  // namespace
}  // namespace normalign
