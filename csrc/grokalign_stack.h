// One GrokAlign step of a stack of Linear layers with activations between them: the forward pass,
// one vector-Jacobian product for each probe, the projection, and later one tangent pass and one
// ordinary backward pass. No double backward (see docs/grokalign.md for the algebra).
//
// Layers l = 0 .. layers-1: z_{l+1} = W_l a_l + b_l, a_{l+1} = phi_l(z_{l+1}); the last layer has
// no activation. Weights are row-major (width[l+1], width[l]), contiguous, as in torch.nn.Linear.
#pragma once
#include "common.h"

namespace normalign {

constexpr int kMaxStackLayers = 32;

enum class Activation : int {
  identity,
  relu,
  leaky_relu,  // p0: slope
  square,
  gelu,
  gelu_tanh,
  silu,
  tanh,
  sigmoid,
  softplus  // p0: beta, p1: threshold
};

enum class StackPenalty : int {
  none,
  orthogonal,  // |J^T v (I - x x^T / |x|^2)|^2
  jacobian,    // |J^T v|^2
  joint        // sqrt(mean over probes of |J^T v|^2) + |f(x) - J x|^2
};

// A task loss that the step can include, as a mean over the batch.
enum class StackCriterion : int {
  none,
  cross_entropy,  // targets: class indices
  squared_error   // targets: batch x width[layers] values; the mean is over all of them
};

// What stays the same from step to step.
struct StackShape {
  int layers = 0;
  int64_t width[kMaxStackLayers + 1] = {};
  bool has_bias[kMaxStackLayers] = {};
  Activation activation[kMaxStackLayers] = {};
  double p0[kMaxStackLayers] = {};
  double p1[kMaxStackLayers] = {};
  StackPenalty penalty = StackPenalty::none;
};

template <class T>
struct StackCall {
  int64_t batch = 0;
  int probes = 0;  // 0: no penalty
  int threads = 1;
  const T* weight[kMaxStackLayers] = {};
  const T* bias[kMaxStackLayers] = {};
  const T* x = nullptr;  // batch x width[0], row stride x_stride
  int64_t x_stride = 0;
  char* workspace = nullptr;  // workspace_*() bytes, 64-byte aligned
  const T* probe = nullptr;   // probes x batch x width[layers], contiguous
  T* logits = nullptr;        // batch x width[layers], contiguous
  bool per_sample = false;    // whether penalty and grad_penalty have an entry for each sample

  // forward
  T* penalty = nullptr;  // averaged over probes and, unless per_sample, over the batch

  // forward with a criterion: total = task + penalty_weight * penalty
  StackCriterion criterion = StackCriterion::none;
  const int64_t* target_class = nullptr;
  const T* target_value = nullptr;
  int64_t ignore_index = 0;  // samples of this class do not count
  T task_scale = T(0);       // 1 / the number of terms that count
  T penalty_weight = T(0);
  T* task = nullptr;
  T* total = nullptr;

  // backward; null gradients stand for zero, null outputs are not computed
  const T* grad_logits = nullptr;  // batch x width[layers], contiguous
  const T* grad_penalty = nullptr;
  const T* grad_total = nullptr;  // with a criterion, instead of the two above
  T* grad_weight[kMaxStackLayers] = {};
  T* grad_bias[kMaxStackLayers] = {};
};

struct GrokalignStackTable {
  int64_t (*workspace_f32)(const StackShape&, int64_t batch, int probes, bool criterion,
                           int threads);
  int64_t (*workspace_f64)(const StackShape&, int64_t batch, int probes, bool criterion,
                           int threads);
  void (*forward_f32)(const StackShape&, const StackCall<float>&);
  void (*forward_f64)(const StackShape&, const StackCall<double>&);
  // After forward with the same workspace, weights and x; may be called again.
  void (*backward_f32)(const StackShape&, const StackCall<float>&);
  void (*backward_f64)(const StackShape&, const StackCall<double>&);
};

NORMALIGN_DECLARE_TABLES(GrokalignStackTable, grokalign_stack);

}  // namespace normalign
