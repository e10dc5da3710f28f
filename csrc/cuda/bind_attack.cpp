#include <pybind11/stl.h>

#include <array>

#include "attack.h"
#include "bind_gpu.h"

namespace normalign {
namespace {

// sizes: machines, radii, m, n, c, d, r. arrays: z, coef, mean, factor, back, x, targets; results:
// points, value, outputs, zero.
template <class T>
void attack(double exponent, double length, int loss, int select, bool l2, int iterations,
            const std::array<int64_t, 7>& sizes, const std::array<Address, 7>& arrays, Address eps,
            Address step, Address lower, Address upper, const std::array<Address, 4>& results,
            int device, Address stream) {
  const auto [machines, radii, m, n, c, d, r] = sizes;
  check_size("machines", machines, 1);
  check_size("radii", radii, 1);
  check_size("m", m, 1);
  check_size("n", n);
  check_size("c", c, 1);
  check_size("d", d);
  check_size("r", r);
  check_size("iterations", iterations);
  if (!(exponent > 0) || !(length > 0))
    throw std::invalid_argument("exponent and length must be positive");
  if (loss < 0 || loss > 2 || select < 0 || select > 2)
    throw std::invalid_argument("no such loss or choice of the result");
  if (machines * radii > 65535)
    throw std::invalid_argument("at most 65535 machines and radii together, got " +
                                std::to_string(machines * radii));
  GpuAttack<T> k{};
  k.kernel = {static_cast<T>(exponent), static_cast<T>(1 / length)};
  k.loss = static_cast<Loss>(loss);
  k.select = static_cast<Select>(select);
  k.l2 = l2;
  k.machines = static_cast<int>(machines);
  k.radii = static_cast<int>(radii);
  k.iterations = iterations;
  k.m = m;
  k.n = static_cast<int>(n);
  k.c = static_cast<int>(c);
  k.d = static_cast<int>(d);
  k.r = static_cast<int>(r);
  const DeviceGuard guard(device);
  if (!attack_fits(k.n, k.c, k.d, k.r, sizeof(T)))
    throw std::invalid_argument("the machine is too large for one block's shared memory");
  k.z = pointer<const T>("z", arrays[0], n * r);
  k.coef = pointer<const T>("coef", arrays[1], n);
  k.mean = pointer<const double>("mean", arrays[2], d);
  k.factor = pointer<const double>("factor", arrays[3], d * r);
  k.back = pointer<const T>("back", arrays[4], d * r);
  k.x = pointer<const T>("x", arrays[5], d);
  k.targets = pointer<const T>("targets", arrays[6], 1);
  k.eps = pointer<const T>("eps", eps, d);
  k.step = pointer<const T>("step", step, d);
  k.lower = reinterpret_cast<const T*>(lower);  // none where null
  k.upper = reinterpret_cast<const T*>(upper);
  k.points = pointer<T>("points", results[0], d);
  k.value = pointer<T>("value", results[1], 1);
  k.outputs = pointer<T>("outputs", results[2], 1);
  k.zero = pointer<int64_t>("zero", results[3], 1);
  check(attack_gpu(k, stream_of(stream)));
}

bool fits(int n, int c, int d, int r, int64_t element, int device) {
  const DeviceGuard guard(device);
  return attack_fits(n, c, d, r, element);
}

}  // namespace

void bind_attack_gpu(py::module_& m) {
  m.def("attack_fits", &fits);
  m.def("attack_f32", &attack<float>);
  m.def("attack_f64", &attack<double>);
}

}  // namespace normalign
