// What the small-stack kernels add for a task loss: the loss of each row, its gradient, and the
// means over the batch, by the block that finishes last.
#pragma once
#include "stack.h"

namespace normalign {
namespace {

// Whether this sample counts; a class outside 0 .. c - 1 that is not ignored counts, and is NaN.
template <class T>
__device__ __forceinline__ bool counts(const GpuStack<T>& k, int64_t sample) {
  return k.criterion != StackCriterion::cross_entropy || k.classes[sample] != k.ignore_index;
}

// The loss of one sample from its logits f, by a warp; its gradient goes to `gradient`, without the
// factor of the mean.
template <class T>
__device__ __forceinline__ T row_loss(const GpuStack<T>& k, int64_t sample, const T* f,
                                      T* gradient) {
  const int lane = threadIdx.x % 32, c = k.width[k.layers];
  T sum = T(0);
  if (k.criterion == StackCriterion::squared_error) {
    for (int j = lane; j < c; j += 32) {
      const T residual = f[j] - k.values[sample * c + j];
      gradient[j] = T(2) * residual;
      sum += residual * residual;
    }
    return warp_sum(sum);
  }
  const bool counted = counts(k, sample);
  const int64_t label = k.classes[sample];
  const bool known = label >= 0 && label < c;
  T top = -T(INFINITY);
  for (int j = lane; j < c; j += 32) top = fmax(top, f[j]);
  NORMALIGN_UNROLL
  for (int lanes = 16; lanes > 0; lanes /= 2)
    top = fmax(top, __shfl_xor_sync(0xffffffffu, top, lanes));
  for (int j = lane; j < c; j += 32) sum += exp(f[j] - top);
  sum = warp_sum(sum);
  for (int j = lane; j < c; j += 32) {
    const T g = exp(f[j] - top) / sum - T(j == label);
    gradient[j] = !counted ? T(0) : known ? g : T(NAN);
  }
  if (!counted) return T(0);
  return known ? top + log(sum) - f[label] : T(NAN);
}

// Called by every block when the rows it owns are written: the last one to do so takes the means,
// in the order of the rows. The counter was 0 before the launch.
template <class T, int threads>
__device__ __forceinline__ void means_by_the_last_block(const GpuStack<T>& k) {
  NORMALIGN_SHARED(double, partial, [32]);
  NORMALIGN_SHARED(int, last, [1]);
  __syncthreads();  // the block's rows are written
  if (threadIdx.x == 0) {
    __threadfence();
    last[0] = atomicAdd(k.finished, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last[0]) return;
  __threadfence();
  double penalty = 0, task = 0, count = 0;
  for (int64_t i = threadIdx.x; i < k.batch; i += threads) {
    penalty += double(k.penalty[i]);
    if (k.criterion != StackCriterion::none) {
      task += double(k.task[i]);
      count += double(counts(k, i));
    }
  }
  penalty = block_sum(penalty, partial) / double(k.batch);
  task = block_sum(task, partial);
  count = block_sum(count, partial);
  if (threadIdx.x != 0) return;
  k.mean_penalty[0] = T(penalty);
  if (k.criterion == StackCriterion::none) return;
  if (k.criterion == StackCriterion::squared_error) count *= double(k.width[k.layers]);
  k.count[0] = T(count);
  k.mean_task[0] = T(task / count);  // NaN where every sample is ignored, as torch has it
  k.total[0] = T(task / count + double(k.penalty_weight) * penalty);
}

// The factor of the gradient that `row_loss` left.
template <class T>
__device__ __forceinline__ T logits_factor(const GpuStack<T>& k) {
  if (!k.grad_total) return T(1);
  return k.count[0] > T(0) ? k.grad_total[0] / k.count[0] : T(0);
}

}  // namespace
}  // namespace normalign
