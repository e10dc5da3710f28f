// Shared by the bindings of the CUDA kernels.
#pragma once
#include "../bind.h"
#include "launch.h"
#if defined(NORMALIGN_WITH_CUDART)
#include <cuda_runtime_api.h>
#else
#include "../emu/machine.h"
#endif

namespace normalign {

inline void check(Status status) {
  if (status) throw std::runtime_error(std::string("CUDA call failed: ") + status);
}

inline Stream stream_of(Address stream) {
  return reinterpret_cast<Stream>(stream);
}

#if defined(NORMALIGN_WITH_CUDART)
inline void check_cuda(cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or the next launch would be blamed for it
  check(cudaGetErrorString(error));
}
inline int current_device() {
  int device = 0;
  check_cuda(cudaGetDevice(&device));
  return device;
}
inline void use_device(int device) {
  check_cuda(cudaSetDevice(device));
}
#else
inline int current_device() {
  return emu::get_device();
}
inline void use_device(int device) {
  if (!emu::set_device(device)) check("invalid device ordinal");
}
#endif

// Makes a device current for a launch, and the one before it afterwards.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : before_(current_device()), changed_(before_ != device) {
    if (changed_) use_device(device);
  }
  ~DeviceGuard() {
    if (!changed_) return;
    try {
      use_device(before_);
    } catch (...) {  // the launch's own error counts
    }
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_;
  bool changed_;
};

}  // namespace normalign
