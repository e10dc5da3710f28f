#include "agop.cuh"

namespace normalign {
namespace {

constexpr int few_agop_rows = 8, many_agop_rows = 32;
// Blocks: four for each of some 130 processors, so that the last ones cost little.
constexpr int64_t agop_full = 528;

// What one launch is: `blocks` share the rows.
struct AgopLaunch {
  int rows, kept;  // of a block, classes of a thread
  AgopPlan plan;
  int64_t bytes, blocks;
};

template <class T, int rows, int kept>
AgopLaunch agop_launch(int count, int64_t m, int width, int c) {
  AgopLaunch launch{rows, kept, agop_plan<T, rows, kept>(width, c), 0, 0};
  launch.bytes = agop_bytes<T, rows, kept>(launch.plan);
  // Beyond twice what fills the GPU a block takes several tiles of rows: the parts stay few.
  const int64_t tiles = (m + rows - 1) / rows, others = int64_t(launch.plan.groups) * count;
  const int64_t each = (tiles * others + 2 * agop_full - 1) / (2 * agop_full);
  launch.blocks = (tiles + each - 1) / each;
  return launch;
}

// Many rows where they make enough blocks, because they share points z in shared memory.
template <class T, int kept>
AgopLaunch choose_rows(int count, int64_t m, int width, int c) {
  const AgopLaunch many = agop_launch<T, many_agop_rows, kept>(count, m, width, c);
  const int64_t tiles = (m + many_agop_rows - 1) / many_agop_rows;
  if (tiles * many.plan.groups * count >= agop_full && many.bytes <= shared_limit()) return many;
  return agop_launch<T, few_agop_rows, kept>(count, m, width, c);
}

// Two classes share their differences z - x; of three, a quarter of two times two would be idle.
template <class T>
AgopLaunch choose_agop(int count, int64_t m, int width, int c) {
  return c == 1 || c == 3 ? choose_rows<T, 1>(count, m, width, c)
                          : choose_rows<T, 2>(count, m, width, c);
}

template <class T, int rows, int kept>
void start_agop(const GpuAgop<T>& k, const AgopLaunch& launch, cudaStream_t stream) {
  const dim3 grid(unsigned(launch.blocks), unsigned(launch.plan.groups), unsigned(k.batch.count));
  NORMALIGN_LAUNCH((agop_kernel<T, rows, kept>), grid, dim3(agop_threads), launch.bytes, stream, k,
                   launch.plan);
}

}  // namespace

template <class T>
int64_t agop_parts(int count, int64_t m, int width, int c) {
  const AgopLaunch launch = choose_agop<T>(count, m, width, c);
  return launch.blocks * launch.plan.groups;
}

template <class T>
Status agop_gpu(const GpuAgop<T>& k, Stream stream) {
  const AgopLaunch launch = choose_agop<T>(k.batch.count, k.m, k.width, k.c);
  const auto on = static_cast<cudaStream_t>(stream);
  if (launch.rows == many_agop_rows)
    launch.kept == 2 ? start_agop<T, many_agop_rows, 2>(k, launch, on)
                     : start_agop<T, many_agop_rows, 1>(k, launch, on);
  else
    launch.kept == 2 ? start_agop<T, few_agop_rows, 2>(k, launch, on)
                     : start_agop<T, few_agop_rows, 1>(k, launch, on);
  return launch_status();
}

#define NORMALIGN_INSTANCE(T)                             \
  template int64_t agop_parts<T>(int, int64_t, int, int); \
  template Status agop_gpu<T>(const GpuAgop<T>&, Stream)
NORMALIGN_INSTANCE(float);
NORMALIGN_INSTANCE(double);
#undef NORMALIGN_INSTANCE

}  // namespace normalign
