#include <pybind11/stl.h>

#include <vector>

#include "bind.h"
#include "dispatch.h"
#include "grokalign_stack.h"

namespace normalign {
namespace {

using Addresses = std::vector<Address>;

// A stack's shape, checked once; the calls that follow check sizes and addresses only.
class GrokalignStack {
 public:
  GrokalignStack(const std::vector<int64_t>& widths, const std::vector<bool>& has_bias,
                 const std::vector<int>& activations, const std::vector<double>& p0,
                 const std::vector<double>& p1, int penalty) {
    const size_t layers = activations.size();
    if (layers < 1 || layers > kMaxStackLayers || widths.size() != layers + 1 ||
        has_bias.size() != layers || p0.size() != layers || p1.size() != layers)
      throw std::invalid_argument("a stack has 1 to 32 layers, each with all its settings");
    shape_.layers = static_cast<int>(layers);
    for (size_t l = 0; l <= layers; ++l) {
      check_size("width", widths[l], 1);
      shape_.width[l] = widths[l];
    }
    for (size_t l = 0; l < layers; ++l) {
      if (activations[l] < 0 || activations[l] > static_cast<int>(Activation::softplus))
        throw std::invalid_argument("unknown activation");
      shape_.has_bias[l] = has_bias[l];
      shape_.activation[l] = static_cast<Activation>(activations[l]);
      shape_.p0[l] = p0[l];
      shape_.p1[l] = p1[l];
    }
    if (shape_.activation[layers - 1] != Activation::identity)
      throw std::invalid_argument("the last layer has no activation");
    shape_.penalty = static_cast<StackPenalty>(penalty);
  }

  template <class T>
  int64_t workspace(int64_t batch, int probes, int threads) const {
    check_size("batch", batch, 1);
    check_size("probes", probes);
    check_size("threads", threads, 1);
    const auto& table = NORMALIGN_SELECT(grokalign_stack);
    return (sizeof(T) == 4 ? table.workspace_f32 : table.workspace_f64)(shape_, batch, probes,
                                                                        threads);
  }

  template <class T>
  void forward(int64_t batch, int probes, int threads, const Addresses& weights,
               const Addresses& biases, Address x, int64_t x_stride, Address workspace,
               Address probe, Address logits, Address penalty) const {
    StackCall<T> call = common<T>(batch, probes, threads, weights, biases, x, x_stride, workspace);
    const int64_t out = batch * shape_.width[shape_.layers];
    call.probe = pointer<const T>("probe", probe, probes * out);
    call.logits = pointer<T>("logits", logits, out);
    call.penalty = pointer<T>("penalty", penalty, probes ? batch : 0);
    const auto& table = NORMALIGN_SELECT(grokalign_stack);
    py::gil_scoped_release release;
    if constexpr (sizeof(T) == 4)
      table.forward_f32(shape_, call);
    else
      table.forward_f64(shape_, call);
  }

  template <class T>
  void backward(int64_t batch, int probes, int threads, const Addresses& weights,
                const Addresses& biases, Address x, int64_t x_stride, Address workspace,
                Address grad_logits, Address grad_penalty, const Addresses& grad_weights,
                const Addresses& grad_biases) const {
    StackCall<T> call = common<T>(batch, probes, threads, weights, biases, x, x_stride, workspace);
    check_count("grad_weights", grad_weights);
    check_count("grad_biases", grad_biases);
    call.grad_logits = reinterpret_cast<const T*>(grad_logits);
    call.grad_penalty = reinterpret_cast<const T*>(grad_penalty);
    for (int l = 0; l < shape_.layers; ++l) {
      call.grad_weight[l] = reinterpret_cast<T*>(grad_weights[l]);
      call.grad_bias[l] = reinterpret_cast<T*>(grad_biases[l]);
    }
    const auto& table = NORMALIGN_SELECT(grokalign_stack);
    py::gil_scoped_release release;
    if constexpr (sizeof(T) == 4)
      table.backward_f32(shape_, call);
    else
      table.backward_f64(shape_, call);
  }

 private:
  void check_count(const char* name, const Addresses& list) const {
    if (static_cast<int>(list.size()) != shape_.layers)
      throw std::invalid_argument(std::string(name) + " must have one entry a layer");
  }

  template <class T>
  StackCall<T> common(int64_t batch, int probes, int threads, const Addresses& weights,
                      const Addresses& biases, Address x, int64_t x_stride,
                      Address workspace) const {
    check_size("batch", batch, 1);
    check_size("probes", probes);
    check_size("threads", threads, 1);
    check_count("weights", weights);
    check_count("biases", biases);
    StackCall<T> call;
    call.batch = batch;
    call.probes = probes;
    call.threads = threads;
    call.x = pointer<const T>("x", x, 1);
    call.x_stride = x_stride;
    call.workspace = pointer<char>("workspace", workspace, 1);
    for (int l = 0; l < shape_.layers; ++l) {
      call.weight[l] = pointer<const T>("weight", weights[l], 1);
      call.bias[l] = pointer<const T>("bias", biases[l], shape_.has_bias[l] ? 1 : 0);
    }
    return call;
  }

  StackShape shape_;
};

}  // namespace

void bind_grokalign_stack(py::module_& m) {
  py::class_<GrokalignStack>(m, "GrokalignStack")
      .def(py::init<const std::vector<int64_t>&, const std::vector<bool>&, const std::vector<int>&,
                    const std::vector<double>&, const std::vector<double>&, int>())
      .def("workspace_f32", &GrokalignStack::workspace<float>)
      .def("workspace_f64", &GrokalignStack::workspace<double>)
      .def("forward_f32", &GrokalignStack::forward<float>)
      .def("forward_f64", &GrokalignStack::forward<double>)
      .def("backward_f32", &GrokalignStack::backward<float>)
      .def("backward_f64", &GrokalignStack::backward<double>);
}

}  // namespace normalign
