#include "agop.cuh"

namespace normalign {
namespace {

constexpr int few_agop_rows = 8, many_agop_rows = 32;
constexpr int64_t agop_full =
    528;  // blocks: four for each processor, so that the last ones cost little

// A launch: the plan of a block, and how many blocks share the rows.
template <class T>
struct AgopLaunch {
  bool many;   // rows
  bool pairs;  // of classes in a thread
  AgopPlan plan;
  int64_t bytes, blocks;
};

template <class T, int rows, int kept>
AgopLaunch<T> agop_launch(int count, int64_t m, int width, int c) {
  AgopLaunch<T> launch;
  launch.many = rows == many_agop_rows;
  launch.pairs = kept == 2;
  launch.plan = agop_plan<T, rows, kept>(width, c);
  launch.bytes = agop_bytes<T, rows, kept>(launch.plan);
  // Beyond twice what fills the GPU a block takes several tiles of rows: the parts stay few.
  const int64_t tiles = (m + rows - 1) / rows, others = int64_t(launch.plan.groups) * count;
  const int64_t each = (tiles * others + 2 * agop_full - 1) / (2 * agop_full);
  launch.blocks = (tiles + each - 1) / each;
  return launch;
}

template <class T>
AgopLaunch<T> choose_agop(int count, int64_t m, int width, int c) {
  // Differences z - x serve two classes; one thread in three would be idle with three of them.
  const bool pairs = c != 1 && c != 3;
  const auto many = pairs ? agop_launch<T, many_agop_rows, 2>(count, m, width, c)
                          : agop_launch<T, many_agop_rows, 1>(count, m, width, c);
  const int64_t tiles = (m + many_agop_rows - 1) / many_agop_rows;
  if (tiles * many.plan.groups * count >= agop_full && many.bytes <= shared_limit()) return many;
  return pairs ? agop_launch<T, few_agop_rows, 2>(count, m, width, c)
               : agop_launch<T, few_agop_rows, 1>(count, m, width, c);
}

}  // namespace

template <class T>
int64_t agop_parts(int count, int64_t m, int width, int c) {
  const auto launch = choose_agop<T>(count, m, width, c);
  return launch.blocks * launch.plan.groups;
}

template <class T>
Status agop_gpu(const GpuAgop<T>& k, Stream stream) {
  const auto launch = choose_agop<T>(k.batch.count, k.m, k.width, k.c);
  const dim3 grid(unsigned(launch.blocks), unsigned(launch.plan.groups), unsigned(k.batch.count));
  const auto kernel = launch.many    ? launch.pairs ? agop_kernel<T, many_agop_rows, 2>
                                                    : agop_kernel<T, many_agop_rows, 1>
                      : launch.pairs ? agop_kernel<T, few_agop_rows, 2>
                                     : agop_kernel<T, few_agop_rows, 1>;
  NORMALIGN_LAUNCH(kernel, grid, dim3(agop_threads), launch.bytes,
                   static_cast<cudaStream_t>(stream), k, launch.plan);
  return launch_status();
}

#define NORMALIGN_INSTANCE(T)                             \
  template int64_t agop_parts<T>(int, int64_t, int, int); \
  template Status agop_gpu<T>(const GpuAgop<T>&, Stream)
NORMALIGN_INSTANCE(float);
NORMALIGN_INSTANCE(double);
#undef NORMALIGN_INSTANCE

}  // namespace normalign
