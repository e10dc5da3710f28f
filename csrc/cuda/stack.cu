#include "stack.cuh"

namespace normalign {
namespace {

constexpr int64_t means_bytes = 1 << 10;  // of static shared memory, for the means
constexpr int small_rows = 8, large_rows = 16;
// With at least this many samples the larger row blocks still fill a GPU of about 130 processors.
constexpr int64_t large_batch = 130 * large_rows;

template <class T>
int widest(const GpuStack<T>& k) {
  int width = 0;
  for (int l = 0; l <= k.layers; ++l)
    width = width < padded(k.width[l]) ? padded(k.width[l]) : width;
  return width;
}

template <class T>
int64_t row_block_bytes(int rows, int width) {
  return 2 * int64_t(rows) * width * int64_t(sizeof(T));
}

template <class T>
bool use_large_rows(const GpuStack<T>& k) {
  return k.batch >= large_batch &&
         row_block_bytes<T>(large_rows, widest(k)) + means_bytes <= shared_limit();
}

template <class T>
int tiles(const GpuStack<T>& k, int size) {
  int count = 0;
  for (int l = 0; l < k.layers; ++l)
    count += ((k.width[l] + size - 1) / size) * ((k.width[l + 1] + size - 1) / size);
  return count;
}

template <class T, int rows>
void launch_forward(const GpuStack<T>& k, cudaStream_t stream) {
  const int width = widest(k);
  const dim3 grid(unsigned((k.batch + rows - 1) / rows));
  NORMALIGN_LAUNCH((stack_forward_kernel<T, rows>), grid, dim3(stack_threads),
                   row_block_bytes<T>(rows, width), stream, k, width);
}

template <class T, int rows>
void launch_backward(const GpuStack<T>& k, cudaStream_t stream) {
  const int width = widest(k);
  const dim3 grid(unsigned((k.batch + rows - 1) / rows));
  NORMALIGN_LAUNCH((stack_backward_kernel<T, rows>), grid, dim3(stack_threads),
                   row_block_bytes<T>(rows, width), stream, k, width);
}

template <class T, Stage stage>
void launch_stage(const GpuStage<T>& call, cudaStream_t stream) {
  const int64_t blocks = (call.batch * call.cols + stack_threads - 1) / stack_threads;
  const dim3 grid(unsigned(blocks < 4096 ? blocks : 4096));
  NORMALIGN_LAUNCH((stage_kernel<T, stage>), grid, dim3(stack_threads), 0, stream, call);
}

// Hands out parts of one workspace, 64-byte aligned; without one it only counts.
template <class T>
struct Cutter {
  T* base;
  int64_t used = 0;
  T* take(int64_t elements) {
    T* const part = base ? base + used : nullptr;
    used += (elements + 15) / 16 * 16;
    return part;
  }
};

template <class T>
int64_t arrange(GpuStack<T>* k, T* workspace) {
  Cutter<T> cut{workspace};
  for (int l = 0; l < k->layers; ++l)
    k->transposed[l] = cut.take(int64_t(k->width[l]) * k->width[l + 1]);
  const int64_t samples = k->batch, all = samples * k->probes;
  k->task = cut.take(samples);
  k->task_gradient = cut.take(samples * k->width[k->layers]);
  k->count = cut.take(1);
  k->finished = reinterpret_cast<unsigned*>(cut.take(1));
  k->t[0] = cut.take(all * k->width[0]);
  for (int l = 1; l < k->layers; ++l) {
    const int64_t n = k->width[l];
    const bool curved = is_curved_gpu(k->activation[l - 1]) && k->probes > 0;
    k->z[l] = cut.take(samples * n);
    k->a[l] = cut.take(samples * n);
    k->delta[l] = cut.take(samples * n);
    k->s[l] = cut.take(all * n);
    k->t[l] = cut.take(all * n);
    k->u[l] = curved ? cut.take(all * n) : nullptr;
    k->cross[l] = curved ? cut.take(samples * n) : nullptr;
  }
  return cut.used;
}

}  // namespace

template <class T>
int64_t stack_workspace(const GpuStack<T>& stack) {
  GpuStack<T> copy = stack;
  return arrange<T>(&copy, nullptr);
}

template <class T>
void stack_arrange(GpuStack<T>* stack, T* workspace) {
  arrange(stack, workspace);
}

bool stack_fits(int layers, const int64_t* width, int64_t element) {
  // Where the weights are larger than this, a library's products are faster than reading them
  // again for every block of rows.
  constexpr int64_t max_weights = 1 << 20;
  int64_t weights = 0, most = 0;
  for (int l = 0; l <= layers; ++l) {
    const int64_t n = (width[l] + depth_step - 1) / depth_step * depth_step;
    most = most < n ? n : most;
    if (l < layers) weights += width[l] * width[l + 1];
  }
  return layers <= kMaxGpuLayers && weights <= max_weights &&
         2 * small_rows * most * element + means_bytes <= shared_limit();
}

template <class T>
Status stack_forward_gpu(const GpuStack<T>& k, Stream stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const dim3 grid(unsigned(tiles(k, transpose_tile)));
  NORMALIGN_LAUNCH((stack_transpose_kernel<T>), grid, dim3(stack_threads), 0, on, k);
  if (use_large_rows(k))
    launch_forward<T, large_rows>(k, on);
  else
    launch_forward<T, small_rows>(k, on);
  return launch_status();
}

template <class T>
Status stack_backward_gpu(const GpuStack<T>& k, Stream stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  if (k.layers > 1) {
    if (use_large_rows(k))
      launch_backward<T, large_rows>(k, on);
    else
      launch_backward<T, small_rows>(k, on);
  }
  const dim3 grid(unsigned(tiles(k, grad_tile)));
  NORMALIGN_LAUNCH((stack_weight_kernel<T>), grid, dim3(stack_threads), 0, on, k);
  return launch_status();
}

template <class T>
Status stage_gpu(Stage stage, const GpuStage<T>& call, Stream stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  switch (stage) {
    case Stage::forward: launch_stage<T, Stage::forward>(call, on); break;
    case Stage::adjoint: launch_stage<T, Stage::adjoint>(call, on); break;
    case Stage::tangent: launch_stage<T, Stage::tangent>(call, on); break;
    case Stage::backward: launch_stage<T, Stage::backward>(call, on); break;
  }
  return launch_status();
}

#define NORMALIGN_INSTANCE(T)                                        \
  template int64_t stack_workspace<T>(const GpuStack<T>&);           \
  template void stack_arrange<T>(GpuStack<T>*, T*);                  \
  template Status stack_forward_gpu<T>(const GpuStack<T>&, Stream);  \
  template Status stack_backward_gpu<T>(const GpuStack<T>&, Stream); \
  template Status stage_gpu<T>(Stage, const GpuStage<T>&, Stream)
NORMALIGN_INSTANCE(float);
NORMALIGN_INSTANCE(double);
#undef NORMALIGN_INSTANCE

}  // namespace normalign
