// The part of CUDA C++ that the kernels use, on the host, for machine.h. Only
// csrc/cuda/portable.cuh includes this.
#pragma once
#include <math.h>
#include <string.h>

#include <type_traits>

#include "device_state.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__ __restrict
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};

using cudaStream_t = void*;

#define gridDim (::normalign::emu::grid_dim)
#define blockDim (::normalign::emu::block_dim)
#define blockIdx (::normalign::emu::block_index)
#define threadIdx (::normalign::emu::thread_index)

// The line of the call, as default arguments: where a collective stands in the source.
#define NORMALIGN_EMU_AT int line = __builtin_LINE(), const char *file = __builtin_FILE()

inline void __syncthreads(NORMALIGN_EMU_AT) {
  ::normalign::emu::block_barrier(false, {file, line});
}
inline int __syncthreads_count(int predicate, NORMALIGN_EMU_AT) {
  return ::normalign::emu::block_barrier(predicate != 0, {file, line});
}
inline int __syncthreads_or(int predicate, NORMALIGN_EMU_AT) {
  return ::normalign::emu::block_barrier(predicate != 0, {file, line}) != 0;
}
// What a thread wrote before it comes before what another reads after its own fence.
inline void __threadfence() {
  ::normalign::emu::fence();
}
inline void __syncwarp(unsigned mask = 0xffffffffu, NORMALIGN_EMU_AT) {
  ::normalign::emu::warp_collective(::normalign::emu::Collective::sync, mask, 0, 0, {file, line});
}
inline unsigned __ballot_sync(unsigned mask, int predicate, NORMALIGN_EMU_AT) {
  return static_cast<unsigned>(::normalign::emu::warp_collective(
      ::normalign::emu::Collective::ballot, mask, predicate != 0, 0, {file, line}));
}

namespace normalign {
namespace emu {

template <class T>
T shuffle(unsigned mask, T value, int source, Where where) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "one register or two");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  bits = warp_collective(Collective::shuffle, mask, bits, source, where);
  memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace emu
}  // namespace normalign

template <class T>
T __shfl_sync(unsigned mask, T value, int source, NORMALIGN_EMU_AT) {
  return ::normalign::emu::shuffle(mask, value, source & 31, {file, line});
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, NORMALIGN_EMU_AT) {
  return ::normalign::emu::shuffle(mask, value, ::normalign::emu::lane() ^ lanes, {file, line});
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, int by, NORMALIGN_EMU_AT) {
  const int own = ::normalign::emu::lane();
  return ::normalign::emu::shuffle(mask, value, own + by < 32 ? own + by : own, {file, line});
}

template <class T>
T __ldg(const T* p) {
  return *p;
}

// A relaxed atomic, which the thread sanitizer knows as one.
template <class T>
T atomicAdd(T* p, std::common_type_t<T> value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "what the hardware has");
  using U = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  U* bits = reinterpret_cast<U*>(p);
  U before = __atomic_load_n(bits, __ATOMIC_RELAXED), after;
  T old, sum;
  do {
    memcpy(&old, &before, sizeof old);
    sum = old + value;
    memcpy(&after, &sum, sizeof after);
  } while (
      !__atomic_compare_exchange_n(bits, &before, after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}
