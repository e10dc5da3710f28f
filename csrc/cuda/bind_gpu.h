// Shared by the bindings of the CUDA kernels.
#pragma once
#include "../bind.h"
#include "launch.h"
#if defined(NORMALIGN_WITH_CUDART)
#include <cuda_runtime_api.h>
#endif

namespace normalign {

inline void check(Status status) {
  if (status) throw std::runtime_error(std::string("CUDA launch failed: ") + status);
}

inline Stream stream_of(Address stream) {
  return reinterpret_cast<Stream>(stream);
}

#if defined(NORMALIGN_WITH_CUDART)
// Makes a device current for a launch, and the one before it afterwards.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&before_));
    if (before_ == device) return;
    check_cuda(cudaSetDevice(device));
    changed_ = true;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  static void check_cuda(cudaError_t error) {
    if (error != cudaSuccess) check(cudaGetErrorString(error));
  }
  int before_ = 0;
  bool changed_ = false;
};
#else
struct DeviceGuard {
  explicit DeviceGuard(int) {}
};
#endif

}  // namespace normalign
