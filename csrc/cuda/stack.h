// One GrokAlign step of a stack of Linear and activation layers on a GPU. The layers and the
// algebra are those of csrc/grokalign_stack.h. The penalties: orthogonal and jacobian.
//
// Small stacks run in four launches: `stack_forward_gpu` transposes the weights, and takes each
// block of rows through the forward pass, the probes' products, the projection and the tangent pass
// with the current layer in shared memory; `stack_backward_gpu` is the ordinary backward chain, and
// the weight gradients of all layers at once. Stacks that are too wide for that leave the products
// to a library, and use `stage_gpu` between them.
#pragma once
#include "../grokalign_stack.h"
#include "launch.h"

namespace normalign {

constexpr int kMaxGpuLayers = 16;

// Passed to kernels by value. Matrices are contiguous; those of one probe follow each other, so
// s, t and u have probes x batch rows.
template <class T>
struct GpuStack {
  int layers;
  int probes;   // 0: no penalty
  int project;  // orthogonal rather than jacobian
  int tangent;  // whether a backward pass will follow
  int64_t batch;
  int width[kMaxGpuLayers + 1];
  Activation activation[kMaxGpuLayers];  // behind layer l; the last has none
  T p0[kMaxGpuLayers], p1[kMaxGpuLayers];
  const T* weight[kMaxGpuLayers];  // (width[l + 1], width[l])
  const T* bias[kMaxGpuLayers];    // may be null
  const T* x;                      // batch x width[0]
  int64_t x_stride;
  const T* probe;  // probes x batch x width[layers]
  T* logits;       // batch x width[layers]
  T* penalty;      // of each sample, the mean over the probes

  // Means over the batch, and a task loss with them; null and none: not wanted.
  T* mean_penalty;
  StackCriterion criterion;
  const int64_t* classes;  // of each sample
  const T* values;         // batch x width[layers]
  int64_t ignore_index;
  T penalty_weight;
  T* mean_task;
  T* total;            // mean_task + penalty_weight mean_penalty
  T* task;             // of each sample
  T* task_gradient;    // in the logits, without the factor of the mean
  T* count;            // what the task loss is a mean over
  unsigned* finished;  // blocks of the forward kernel

  T* transposed[kMaxGpuLayers];  // W^T, (width[l], width[l + 1])

  // What the backward pass needs, index l = 1 .. layers - 1: behind layer l - 1.
  T* z[kMaxGpuLayers];      // before the activation
  T* a[kMaxGpuLayers];      // after it
  T* s[kMaxGpuLayers];      // adjoint of z for the probes
  T* u[kMaxGpuLayers];      // adjoint of a for the probes; only behind curved activations
  T* t[kMaxGpuLayers];      // tangent of a along the residual; index 0: the residual itself
  T* cross[kMaxGpuLayers];  // sum over probes of phi''(z) q u; only behind curved activations
  T* delta[kMaxGpuLayers];  // adjoint of z for the task and the penalty

  // backward; null: zero, or not wanted
  const T* grad_logits;   // batch x width[layers]
  const T* grad_penalty;  // of each sample, or one for all (stride 0)
  int64_t grad_penalty_stride;
  T grad_penalty_scale;  // 2 / probes, and 1 / batch where the penalty is a mean
  const T* grad_total;   // of total: then grad_logits is task_gradient, up to its factor
  T* grad_weight[kMaxGpuLayers];
  T* grad_bias[kMaxGpuLayers];
};

// How many elements the backward pass needs to keep.
template <class T>
int64_t stack_workspace(const GpuStack<T>& stack);
// Points the arrays into such a workspace.
template <class T>
void stack_arrange(GpuStack<T>* stack, T* workspace);
// Whether a row block of this stack fits into the shared memory of the current device.
bool stack_fits(int layers, const int64_t* width, int64_t element);

template <class T>
Status stack_forward_gpu(const GpuStack<T>& stack, Stream stream);
template <class T>
Status stack_backward_gpu(const GpuStack<T>& stack, Stream stream);

// The elementwise steps between products, for matrices of rows x cols with one z for each sample
// (rows = probes x batch for the probes' steps). All contiguous.
enum class Stage : int {
  forward,   // in: product -> z = in + bias (in place), out = phi(z)
  adjoint,   // out = phi'(z) in
  tangent,   // out = phi'(z) in, and cross = sum over probes of phi''(z) in u where given
  backward,  // out = phi'(z) in + grad_penalty cross
};
template <class T>
struct GpuStage {
  int64_t batch, probes, cols;
  Activation activation;
  T p0, p1;
  T* in;
  const T* bias;
  const T* z;
  const T* u;
  T* cross;
  const T* grad_penalty;
  int64_t grad_penalty_stride;
  T grad_penalty_scale;
  T* out;
};
template <class T>
Status stage_gpu(Stage stage, const GpuStage<T>& call, Stream stream);

}  // namespace normalign
