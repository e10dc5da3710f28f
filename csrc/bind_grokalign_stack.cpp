#include <pybind11/stl.h>

#include <vector>

#include "bind.h"
#include "dispatch.h"
#include "grokalign_stack.h"

namespace normalign {
namespace {

using Addresses = std::vector<Address>;

// One step of one stack: what forward was given and left behind is kept for backward, which
// receives only the gradients. The caller keeps the tensors behind the addresses alive.
template <class T>
class Step {
 public:
  Step(const StackShape& shape, int64_t batch, int probes, int threads, const Addresses& weights,
       const Addresses& biases, Address x, int64_t x_stride, Address probe, Address logits)
      : shape_(shape) {
    check_size("batch", batch, 1);
    check_size("probes", probes);
    check_size("threads", threads, 1);
    check_count("weights", weights);
    check_count("biases", biases);
    const int64_t out = batch * shape_.width[shape_.layers];
    call_.batch = batch;
    call_.probes = probes;
    call_.threads = threads;
    call_.x = pointer<const T>("x", x, 1);
    call_.x_stride = x_stride;
    call_.probe = pointer<const T>("probe", probe, probes * out);
    call_.logits = pointer<T>("logits", logits, out);
    for (int l = 0; l < shape_.layers; ++l) {
      call_.weight[l] = pointer<const T>("weight", weights[l], 1);
      call_.bias[l] = pointer<const T>("bias", biases[l], shape_.has_bias[l] ? 1 : 0);
    }
  }

  // Adds a task loss. Class indices are checked here, before any kernel runs.
  void criterion(int kind, Address target, int64_t ignore_index, double penalty_weight) {
    const int64_t classes = shape_.width[shape_.layers];
    call_.criterion = static_cast<StackCriterion>(kind);
    call_.ignore_index = ignore_index;
    call_.penalty_weight = static_cast<T>(penalty_weight);
    int64_t terms = 0;
    if (call_.criterion == StackCriterion::squared_error) {
      call_.target_value = pointer<const T>("target", target, 1);
      terms = call_.batch * classes;
    } else if (call_.criterion == StackCriterion::cross_entropy) {
      call_.target_class = pointer<const int64_t>("target", target, 1);
      for (int64_t i = 0; i < call_.batch; ++i) {
        const int64_t y = call_.target_class[i];
        if (y == ignore_index) continue;
        if (y < 0 || y >= classes)
          throw py::index_error("target must be a class from 0 to " + std::to_string(classes - 1) +
                                ", got " + std::to_string(y));
        ++terms;
      }
    } else {
      throw std::invalid_argument("unknown criterion");
    }
    call_.task_scale = T(1) / static_cast<T>(terms);
  }

  int64_t workspace() const {
    return (sizeof(T) == 4 ? table_.workspace_f32 : table_.workspace_f64)(
        shape_, call_.batch, call_.probes, call_.criterion != StackCriterion::none, call_.threads);
  }

  // penalty: one number, or one a sample. task, total: one number each, with a criterion.
  void forward(Address workspace, Address penalty, bool per_sample, Address task, Address total) {
    const bool with_task = call_.criterion != StackCriterion::none;
    call_.workspace = pointer<char>("workspace", (workspace + 63) / 64 * 64, 1);
    call_.penalty = pointer<T>("penalty", penalty, call_.probes);
    call_.per_sample = per_sample;
    call_.task = pointer<T>("task", task, with_task);
    call_.total = pointer<T>("total", total, with_task);
    py::gil_scoped_release release;
    if constexpr (sizeof(T) == 4)
      table_.forward_f32(shape_, call_);
    else
      table_.forward_f64(shape_, call_);
  }

  void backward(Address grad_logits, Address grad_penalty, Address grad_total,
                const Addresses& grad_weights, const Addresses& grad_biases) const {
    if (!call_.workspace) throw std::invalid_argument("backward needs a forward before it");
    check_count("grad_weights", grad_weights);
    check_count("grad_biases", grad_biases);
    StackCall<T> call = call_;
    call.grad_logits = reinterpret_cast<const T*>(grad_logits);
    call.grad_penalty = reinterpret_cast<const T*>(grad_penalty);
    call.grad_total = reinterpret_cast<const T*>(grad_total);
    for (int l = 0; l < shape_.layers; ++l) {
      call.grad_weight[l] = reinterpret_cast<T*>(grad_weights[l]);
      call.grad_bias[l] = reinterpret_cast<T*>(grad_biases[l]);
    }
    py::gil_scoped_release release;
    if constexpr (sizeof(T) == 4)
      table_.backward_f32(shape_, call);
    else
      table_.backward_f64(shape_, call);
  }

 private:
  void check_count(const char* name, const Addresses& list) const {
    if (static_cast<int>(list.size()) != shape_.layers)
      throw std::invalid_argument(std::string(name) + " must have one entry a layer");
  }

  StackShape shape_;
  StackCall<T> call_;
  // Of one instruction set from the first call to the last: the workspace is laid out for it.
  const GrokalignStackTable& table_ = NORMALIGN_SELECT(grokalign_stack);
};

StackShape make_shape(const std::vector<int64_t>& widths, const std::vector<bool>& has_bias,
                      const std::vector<int>& activations, const std::vector<double>& p0,
                      const std::vector<double>& p1, int penalty) {
  const size_t layers = activations.size();
  if (layers < 1 || layers > kMaxStackLayers || widths.size() != layers + 1 ||
      has_bias.size() != layers || p0.size() != layers || p1.size() != layers)
    throw std::invalid_argument("a stack has 1 to 32 layers, each with all its settings");
  StackShape shape;
  shape.layers = static_cast<int>(layers);
  for (size_t l = 0; l <= layers; ++l) {
    check_size("width", widths[l], 1);
    shape.width[l] = widths[l];
  }
  for (size_t l = 0; l < layers; ++l) {
    if (activations[l] < 0 || activations[l] > static_cast<int>(Activation::softplus))
      throw std::invalid_argument("unknown activation");
    shape.has_bias[l] = has_bias[l];
    shape.activation[l] = static_cast<Activation>(activations[l]);
    shape.p0[l] = p0[l];
    shape.p1[l] = p1[l];
  }
  if (shape.activation[layers - 1] != Activation::identity)
    throw std::invalid_argument("the last layer has no activation");
  if (penalty < 0 || penalty > static_cast<int>(StackPenalty::joint))
    throw std::invalid_argument("unknown penalty");
  shape.penalty = static_cast<StackPenalty>(penalty);
  return shape;
}

template <class T>
void bind_step(py::module_& m, const char* name) {
  py::class_<Step<T>>(m, name)
      .def(py::init<const StackShape&, int64_t, int, int, const Addresses&, const Addresses&,
                    Address, int64_t, Address, Address>())
      .def("criterion", &Step<T>::criterion)
      .def("workspace", &Step<T>::workspace)
      .def("forward", &Step<T>::forward)
      .def("backward", &Step<T>::backward);
}

}  // namespace

void bind_grokalign_stack(py::module_& m) {
  py::class_<StackShape>(m, "GrokalignStackShape").def(py::init(&make_shape));
  bind_step<float>(m, "GrokalignStackStep_f32");
  bind_step<double>(m, "GrokalignStackStep_f64");
}

}  // namespace normalign
