#include "bind.h"
#include "dispatch.h"
#include "elementary.h"

namespace normalign {
namespace {

template <class T>
void call(const std::string& function, int64_t n, Address x, Address y) {
  check_size("n", n);
  const bool exp2 = function == "exp2", sqrt = function == "sqrt";
  if (!exp2 && !sqrt && function != "exp")
    throw std::invalid_argument("function must be exp, exp2 or sqrt, got " + function);
  const auto which = exp2 ? Elementary::exp2 : sqrt ? Elementary::sqrt : Elementary::exp;
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
