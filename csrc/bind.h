// Helpers for bindings: addresses come as integers, sizes as signed integers. A null address is
// refused when there is anything to read behind it (meta and fake tensors have address 0).
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace normalign {

namespace py = pybind11;
using Address = std::uintptr_t;

inline void check_size(const char* name, int64_t value, int64_t least = 0) {
  if (value < least)
    throw std::invalid_argument(std::string(name) + " must be at least " + std::to_string(least) +
                                ", got " + std::to_string(value));
}

template <class T>
T* pointer(const char* name, Address address, int64_t elements) {
  if (address == 0 && elements > 0)
    throw std::invalid_argument(std::string(name) + " has no memory (a meta or fake tensor?)");
  return reinterpret_cast<T*>(address);
}

}  // namespace normalign
