#include <pybind11/stl.h>

#include <tuple>

#include "bind.h"
#include "dispatch.h"
#include "rfam_attack.h"

namespace normalign {
namespace {

template <class T>
const AttackOf<T>& attack_table() {
  const auto& table = NORMALIGN_SELECT(rfam_attack);
  if constexpr (sizeof(T) == 4)
    return table.f32;
  else
    return table.f64;
}

template <class T>
void project(int64_t m, int64_t d, int64_t r, Address x, int64_t ldx, Address mean, Address factor,
             Address u, Address workspace, int threads) {
  check_size("m", m);
  check_size("d", d);
  check_size("r", r);
  const T* xp = pointer<const T>("x", x, m * d);
  const T* mp = pointer<const T>("mean", mean, d);
  const T* fp = pointer<const T>("factor", factor, d * r);
  T* up = pointer<T>("u", u, m * r);
  T* wp = pointer<T>("workspace", workspace, m * (d + r));
  py::gil_scoped_release release;
  attack_table<T>().project(m, d, r, xp, ldx, mp, fp, up, wp, threads);
}

// (kernel, exponent, scale, n, c, d, r, mean, factor, z, z_panels, coef)
using MachineTuple = std::tuple<int, double, double, int64_t, int64_t, int64_t, int64_t, Address,
                                Address, Address, Address, Address>;

template <class T>
AttackedMachine<T> machine_of(const MachineTuple& t) {
  const auto [kernel, exponent, scale, n, c, d, r, mean, factor, z, z_panels, coef] = t;
  if (kernel < 0 || kernel > 2)
    throw std::invalid_argument("kernel must be 0, 1 or 2, got " + std::to_string(kernel));
  check_size("n", n);
  check_size("c", c, 1);
  check_size("d", d);
  check_size("r", r);
  return {kernel,
          static_cast<T>(exponent),
          static_cast<T>(scale),
          n,
          c,
          d,
          r,
          pointer<const T>("mean", mean, d),
          pointer<const T>("factor", factor, d * r),
          pointer<const T>("z", z, n * r),
          pointer<const T>("z_panels", z_panels, n * r),
          pointer<const T>("coef", coef, n * c)};
}

template <class T>
void gradient(const MachineTuple& machine, int64_t m, Address u, Address u_panels,
              Address cotangent, Address g, Address workspace, int threads) {
  check_size("m", m);
  const auto mp = machine_of<T>(machine);
  const T* up = pointer<const T>("u", u, m * mp.r);
  const T* pp = pointer<const T>("u_panels", u_panels, m * mp.r);
  const T* cp = pointer<const T>("cotangent", cotangent, m);
  T* gp = pointer<T>("g", g, m * mp.r);
  T* wp = pointer<T>("workspace", workspace, m);
  py::gil_scoped_release release;
  attack_table<T>().gradient(mp, m, up, pp, cp, gp, wp, threads);
}

template <class T>
void attack(const MachineTuple& machine, int loss, int select, bool l2, int64_t iterations,
            Address eps, Address step, double eps_all, double step_all, Address lower,
            Address upper, int64_t m, Address x, Address targets, Address current, Address value,
            Address outputs, Address zero_gradients, Address workspace, int threads) {
  check_size("m", m);
  check_size("iterations", iterations);
  const auto mp = machine_of<T>(machine);
  const AttackSettings<T> settings{
      static_cast<Loss>(loss),           static_cast<Select>(select), l2, iterations,
      reinterpret_cast<const T*>(eps),   // null: eps_all
      reinterpret_cast<const T*>(step),  // null: step_all
      static_cast<T>(eps_all),           static_cast<T>(step_all),
      reinterpret_cast<const T*>(lower),   // none where null
      reinterpret_cast<const T*>(upper)};  // none where null
  const T* xp = pointer<const T>("x", x, m * mp.d);
  const T* tp = pointer<const T>("targets", targets, m);
  T* cp = pointer<T>("current", current, m * mp.d);
  T* vp = pointer<T>("value", value, m);
  T* op = pointer<T>("outputs", outputs, m);
  int64_t* zp = pointer<int64_t>("zero_gradients", zero_gradients, m);
  T* wp = pointer<T>("workspace", workspace, m);
  py::gil_scoped_release release;
  attack_table<T>().attack(mp, settings, m, xp, tp, cp, vp, op, zp, wp, threads);
}

}  // namespace

void bind_rfam_attack(py::module_& m) {
  m.def("rfam_project_f32", &project<float>);
  m.def("rfam_project_f64", &project<double>);
  m.def("rfam_gradient_f32", &gradient<float>);
  m.def("rfam_gradient_f64", &gradient<double>);
  m.def("rfam_attack_f32", &attack<float>);
  m.def("rfam_attack_f64", &attack<double>);
  m.def("rfam_attack_workspace", &attack_workspace);
}

}  // namespace normalign
