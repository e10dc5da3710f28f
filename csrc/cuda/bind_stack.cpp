// A small stack is an object: shapes are checked once, a step passes addresses only.
#include <pybind11/stl.h>

#include <tuple>
#include <vector>

#include "bind_gpu.h"
#include "stack.h"

namespace normalign {
namespace {

using Addresses = std::vector<Address>;
// kind, target, ignore_index, weight of the penalty, addresses of its mean, of the task loss and of
// their sum
using LossTuple = std::tuple<int, Address, int64_t, double, Address, Address, Address>;

void expect(bool right, const std::string& what) {
  if (!right) throw std::invalid_argument(what);
}

struct Stack {
  std::vector<int64_t> width;
  std::vector<int> activation;
  std::vector<double> p0, p1;

  Stack(std::vector<int64_t> widths, std::vector<int> activations, std::vector<double> first,
        std::vector<double> second)
      : width(std::move(widths)),
        activation(std::move(activations)),
        p0(std::move(first)),
        p1(std::move(second)) {
    const size_t layers = activation.size();
    expect(layers >= 1 && width.size() == layers + 1 && p0.size() == layers && p1.size() == layers,
           "widths must have one entry more than activations and their parameters");
    for (int64_t n : width) check_size("width", n, 1);
    for (int kind : activation)
      expect(kind >= 0 && kind <= static_cast<int>(Activation::softplus), "unknown activation");
  }

  int layers() const { return static_cast<int>(activation.size()); }

  bool fits(int64_t element, int device) const {
    const DeviceGuard guard(device);
    return stack_fits(layers(), width.data(), element);
  }

  template <class T>
  GpuStack<T> shaped(int64_t batch, int probes) const {
    expect(stack_fits(layers(), width.data(), sizeof(T)),
           "the stack is too large for the small-stack kernels");
    check_size("batch", batch, 1);
    check_size("probes", probes);
    GpuStack<T> k{};
    k.layers = layers();
    k.batch = batch;
    k.probes = probes;
    for (int l = 0; l <= k.layers; ++l) k.width[l] = static_cast<int>(width[l]);
    for (int l = 0; l < k.layers; ++l) {
      k.activation[l] = static_cast<Activation>(activation[l]);
      k.p0[l] = static_cast<T>(p0[l]);
      k.p1[l] = static_cast<T>(p1[l]);
    }
    return k;
  }

  template <class T>
  int64_t workspace(int64_t batch, int probes, int device) const {
    const DeviceGuard guard(device);
    return stack_workspace(shaped<T>(batch, probes));
  }

  template <class T>
  GpuStack<T> bound(int64_t batch, int probes, const Addresses& weights, const Addresses& biases,
                    Address x, int64_t x_stride, Address probe, Address memory) const {
    GpuStack<T> k = shaped<T>(batch, probes);
    expect(weights.size() == activation.size() && biases.size() == activation.size(),
           "one weight and one bias for each layer");
    for (int l = 0; l < k.layers; ++l) {
      k.weight[l] = pointer<const T>("weight", weights[l], 1);
      k.bias[l] = reinterpret_cast<const T*>(biases[l]);
    }
    k.x = pointer<const T>("x", x, 1);
    k.x_stride = x_stride;
    k.probe = pointer<const T>("probes", probe, probes);
    stack_arrange(&k, pointer<T>("workspace", memory, 1));
    return k;
  }

  template <class T>
  void forward(int64_t batch, int probes, const Addresses& weights, const Addresses& biases,
               Address x, int64_t x_stride, Address probe, Address memory, bool project,
               bool tangent, Address logits, Address penalty, const LossTuple& loss, int device,
               Address stream) const {
    const DeviceGuard guard(device);
    GpuStack<T> k = bound<T>(batch, probes, weights, biases, x, x_stride, probe, memory);
    k.project = project;
    k.tangent = tangent;
    k.logits = pointer<T>("logits", logits, 1);
    k.penalty = pointer<T>("penalty", penalty, probes);
    const auto [kind, target, ignore_index, weight, mean_penalty, mean_task, total] = loss;
    expect(kind >= 0 && kind <= static_cast<int>(StackCriterion::squared_error),
           "unknown criterion");
    k.criterion = static_cast<StackCriterion>(kind);
    k.mean_penalty = reinterpret_cast<T*>(mean_penalty);  // null: not wanted
    if (k.criterion != StackCriterion::none) {
      k.mean_penalty = pointer<T>("mean_penalty", mean_penalty, 1);
      k.classes = pointer<const int64_t>("target", target, 1);
      k.values = pointer<const T>("target", target, 1);
      k.ignore_index = ignore_index;
      k.penalty_weight = static_cast<T>(weight);
      k.mean_task = pointer<T>("mean_task", mean_task, 1);
      k.total = pointer<T>("total", total, 1);
    }
    check(stack_forward_gpu(k, stream_of(stream)));
  }

  template <class T>
  void backward(int64_t batch, int probes, const Addresses& weights, const Addresses& biases,
                Address x, int64_t x_stride, Address probe, Address memory, Address grad_logits,
                Address grad_penalty, int64_t grad_penalty_stride, double grad_penalty_scale,
                Address grad_total, const Addresses& grad_weights, const Addresses& grad_biases,
                int device, Address stream) const {
    const DeviceGuard guard(device);
    GpuStack<T> k = bound<T>(batch, probes, weights, biases, x, x_stride, probe, memory);
    expect(grad_weights.size() == activation.size() && grad_biases.size() == activation.size(),
           "one address for each gradient");
    k.grad_logits = reinterpret_cast<const T*>(grad_logits);
    k.grad_penalty = reinterpret_cast<const T*>(grad_penalty);
    k.grad_penalty_stride = grad_penalty_stride;
    k.grad_penalty_scale = static_cast<T>(grad_penalty_scale);
    k.grad_total = reinterpret_cast<const T*>(grad_total);
    if (k.grad_total) {  // the forward pass left the task's gradient
      k.grad_logits = k.task_gradient;
      k.grad_penalty = k.grad_total;
      k.grad_penalty_stride = 0;
    }
    for (int l = 0; l < k.layers; ++l) {
      k.grad_weight[l] = reinterpret_cast<T*>(grad_weights[l]);
      k.grad_bias[l] = reinterpret_cast<T*>(grad_biases[l]);
    }
    check(stack_backward_gpu(k, stream_of(stream)));
  }
};

template <class T>
void stage(int kind, int64_t batch, int64_t probes, int64_t cols, int activation, double p0,
           double p1, Address in, Address bias, Address z, Address u, Address cross,
           Address grad_penalty, int64_t grad_penalty_stride, double grad_penalty_scale,
           Address out, int device, Address stream) {
  expect(kind >= 0 && kind <= static_cast<int>(Stage::backward), "unknown stage");
  check_size("batch", batch, 1);
  check_size("cols", cols, 1);
  GpuStage<T> k{};
  k.batch = batch;
  k.probes = probes;
  k.cols = cols;
  k.activation = static_cast<Activation>(activation);
  k.p0 = static_cast<T>(p0);
  k.p1 = static_cast<T>(p1);
  k.in = pointer<T>("in", in, 1);
  k.bias = reinterpret_cast<const T*>(bias);
  k.z = pointer<const T>("z", z, kind == static_cast<int>(Stage::forward) ? 0 : 1);
  k.u = reinterpret_cast<const T*>(u);
  k.cross = reinterpret_cast<T*>(cross);
  k.grad_penalty = reinterpret_cast<const T*>(grad_penalty);
  k.grad_penalty_stride = grad_penalty_stride;
  k.grad_penalty_scale = static_cast<T>(grad_penalty_scale);
  k.out = pointer<T>("out", out, 1);
  const DeviceGuard guard(device);
  check(stage_gpu(static_cast<Stage>(kind), k, stream_of(stream)));
}

}  // namespace

void bind_stack_gpu(py::module_& m) {
  py::class_<Stack>(m, "Stack")
      .def(py::init<std::vector<int64_t>, std::vector<int>, std::vector<double>,
                    std::vector<double>>())
      .def("fits", &Stack::fits)
      .def("workspace_f32", &Stack::workspace<float>)
      .def("workspace_f64", &Stack::workspace<double>)
      .def("forward_f32", &Stack::forward<float>)
      .def("forward_f64", &Stack::forward<double>)
      .def("backward_f32", &Stack::backward<float>)
      .def("backward_f64", &Stack::backward<double>);
  m.def("stage_f32", &stage<float>);
  m.def("stage_f64", &stage<double>);
}

}  // namespace normalign
