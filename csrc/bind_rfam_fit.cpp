#include <pybind11/stl.h>

#include <tuple>

#include "bind.h"
#include "dispatch.h"
#include "rfam_fit.h"

namespace normalign {
namespace {

template <class T>
const RfamFitOf<T>& fit_table() {
  const auto& table = NORMALIGN_SELECT(rfam_fit);
  if constexpr (sizeof(T) == 4)
    return table.f32;
  else
    return table.f64;
}

// (kernel, exponent, scale, n, d, r, c, mean, factor)
using MachineTuple =
    std::tuple<int, double, double, int64_t, int64_t, int64_t, int64_t, Address, Address>;

template <class T>
KernelSystem<T> system_of(const MachineTuple& t) {
  const auto [kernel, exponent, scale, n, d, r, c, mean, factor] = t;
  if (kernel < 0 || kernel > 2)
    throw std::invalid_argument("kernel must be 0, 1 or 2, got " + std::to_string(kernel));
  check_size("n", n, 1);
  check_size("d", d);
  check_size("r", r);
  check_size("c", c, 1);
  KernelSystem<T> system{};
  system.kernel = kernel;
  system.exponent = exponent;
  system.scale = scale;
  system.n = n;
  system.d = d;
  system.r = r;
  system.c = c;
  system.mean = pointer<const T>("mean", mean, d);
  system.factor = pointer<const double>("factor", factor, d * r);
  return system;
}

template <class T>
py::tuple solve(const MachineTuple& machine, Address x, int64_t ldx, Address y, Address weight,
                double reg, const std::tuple<double, double, double, double>& limits, bool refine,
                Address u, Address panels, Address coef, Address workspace, int threads) {
  auto system = system_of<T>(machine);
  check_size("ldx", ldx, system.d);
  check_size("threads", threads, 1);
  const auto [wide, stand, hard, near] = limits;
  const Float32Rules rules{wide, stand, hard, near};
  system.x = pointer<const T>("x", x, system.n * system.d);
  system.ldx = ldx;
  system.y = pointer<const T>("y", y, system.n);
  system.weight = reinterpret_cast<const T*>(weight);  // none where null
  system.reg = reg;
  T* up = pointer<T>("u", u, system.n * system.r);
  T* pp = pointer<T>("panels", panels, system.n * system.r);
  T* cp = pointer<T>("coef", coef, system.n);
  void* wp = pointer<char>("workspace", workspace, system.n);
  T pivots[2] = {T(0), T(0)}, largest = T(0);
  Solved status;
  {
    py::gil_scoped_release release;
    status = fit_table<T>().solve(system, rules, refine, up, pp, cp, pivots, &largest, wp, threads);
  }
  return py::make_tuple(static_cast<int>(status), static_cast<double>(pivots[0]),
                        static_cast<double>(largest));
}

template <class T>
void predict(const MachineTuple& machine, int64_t m, Address x, int64_t ldx, Address z_panels,
             Address coef, Address out, Address workspace, int threads) {
  const auto system = system_of<T>(machine);
  check_size("m", m);
  check_size("ldx", ldx, system.d);
  check_size("threads", threads, 1);
  const T* xp = pointer<const T>("x", x, m * system.d);
  const T* zp = pointer<const T>("z_panels", z_panels, system.n * system.r);
  const T* cp = pointer<const T>("coef", coef, system.n);
  T* op = pointer<T>("out", out, m);
  void* wp = pointer<char>("workspace", workspace, m);
  py::gil_scoped_release release;
  fit_table<T>().predict(system, m, xp, ldx, zp, cp, op, wp, threads);
}

py::object next_factor(int64_t d, int64_t r, Address factor, Address agop, double tolerance,
                       Address next, Address workspace) {
  check_size("d", d, 1);
  check_size("r", r, 1);
  const double* fp = pointer<const double>("factor", factor, d * r);
  const double* ap = pointer<const double>("agop", agop, r);
  double* np = pointer<double>("next", next, d * r);
  double* wp = pointer<double>("workspace", workspace, r);
  double change = 0;
  const auto& table = NORMALIGN_SELECT(rfam_fit);
  if (!table.next_factor(d, r, fp, ap, tolerance, np, &change, wp)) return py::none();
  return py::float_(change);
}

}  // namespace

void bind_rfam_fit(py::module_& m) {
  m.def("rfam_solve_f32", &solve<float>);
  m.def("rfam_solve_f64", &solve<double>);
  m.def("rfam_predict_f32", &predict<float>);
  m.def("rfam_predict_f64", &predict<double>);
  m.def("rfam_next_factor", &next_factor);
  m.def("rfam_solve_workspace", &rfam_solve_workspace);
  m.def("rfam_predict_workspace", &rfam_predict_workspace);
}

}  // namespace normalign
