#include "bind.h"
#include "dispatch.h"
#include "elementary.h"

namespace normalign {
namespace {

template <class T>
void call(const std::string& function, int64_t n, Address x, Address y) {
  check_size("n", n);
  Elementary which = Elementary::exp;
  if (function == "exp2")
    which = Elementary::exp2;
  else if (function == "sqrt")
    which = Elementary::sqrt;
  else if (function == "log2")
    which = Elementary::log2;
  else if (function != "exp")
    throw std::invalid_argument("function must be exp, exp2, log2 or sqrt, got " + function);
  const auto& table = NORMALIGN_SELECT(elementary);
  const T* from = pointer<const T>("x", x, n);
  T* to = pointer<T>("y", y, n);
  if constexpr (sizeof(T) == 4)
    table.f32(which, n, from, to);
  else
    table.f64(which, n, from, to);
}

}  // namespace

void bind_elementary(py::module_& m) {
  m.def("elementary_f32", &call<float>);
  m.def("elementary_f64", &call<double>);
}

}  // namespace normalign
