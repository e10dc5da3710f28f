// Small kernels, each right as written and wrong with one seeded mistake. The tests run both and
// expect the mistake to be seen: a broken machine would hide the mistakes of real kernels too.
//   seeded_bugs rounding           see seeded_matrix.h
//   seeded_bugs KERNEL good|bad    exits 0 clean, 1 wrong result, 3 reported by the machine
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "../cuda/portable.cuh"
#include "seeded_matrix.h"

namespace normalign {
namespace {

bool bad = false;  // whether the mistake is made

// Every thread reads its neighbour's value: needs a barrier between write and read.
__global__ void neighbour(const float* in, float* out) {
  NORMALIGN_SHARED(float, tile, [64]);
  tile[threadIdx.x] = in[threadIdx.x];
  if (!bad) __syncthreads();
  out[threadIdx.x] = tile[63 - threadIdx.x];
}

// A second round reuses the tile: needs a barrier between read and overwrite.
__global__ void reuse(const float* in, float* out) {
  NORMALIGN_SHARED(float, tile, [64]);
  float sum = 0;
  for (int round = 0; round < 2; ++round) {
    tile[threadIdx.x] = in[64 * round + threadIdx.x];
    __syncthreads();
    sum += tile[63 - threadIdx.x];
    if (!bad) __syncthreads();
  }
  out[threadIdx.x] = sum;
}

// A barrier that only half of the block reaches.
__global__ void divergent(const float* in, float* out) {
  NORMALIGN_SHARED(float, tile, [64]);
  tile[threadIdx.x] = in[threadIdx.x];
  if (!bad || threadIdx.x < 32) __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x];
}

// Two branches with a barrier each: not the same barrier.
__global__ void two_barriers(const float* in, float* out) {
  if (bad && threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
  out[threadIdx.x] = in[threadIdx.x];
}

// The bounds of a row: reads one element past the end.
__global__ void past_the_end(const float* in, float* out, int n) {
  const int i = threadIdx.x;
  if (i < n) out[i] = i + 1 < n + bad ? in[i + 1] : 0.0f;
}

// The bounds of an output.
__global__ void store_past_the_end(const float* in, float* out, int n) {
  const int i = threadIdx.x;
  if (i < n + bad) out[i] = in[i < n ? i : 0];
}

// The bounds of shared memory, static and dynamic.
__global__ void shared_bounds(const float* in, float* out) {
  NORMALIGN_SHARED(float, tile, [64]);
  tile[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  float* const start = tile;
  out[threadIdx.x] = threadIdx.x == 63 && bad ? start[64] : tile[threadIdx.x];
}
__global__ void dynamic_bounds(const float* in, float* out) {
  NORMALIGN_DYNAMIC_SHARED(float, tile);
  tile[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x + (threadIdx.x == 63 && bad)];
}

// Shared memory is not zero at the start.
__global__ void uninitialised(const float* in, float* out) {
  NORMALIGN_SHARED(float, tile, [64]);
  if (!bad || threadIdx.x != 5) tile[threadIdx.x] = 0;
  tile[threadIdx.x] += in[threadIdx.x];
  out[threadIdx.x] = tile[threadIdx.x];
}

// A full mask while some lanes have left.
__global__ void lanes_left(const float* in, float* out) {
  if (bad && threadIdx.x % 32 == 31) return;
  const float sum = warp_sum(in[threadIdx.x]);
  out[threadIdx.x] = sum;
}

// A mask without the caller, and lanes that disagree.
__global__ void mask_without_caller(const float* in, float* out) {
  const unsigned mask = bad && threadIdx.x == 0 ? 0xfffffffeu : 0xffffffffu;
  out[threadIdx.x] = __shfl_sync(mask, in[threadIdx.x], 3);
}
__global__ void masks_disagree(const float* in, float* out) {
  const unsigned mask = bad && threadIdx.x % 2 ? 0xaaaaaaaau : 0xffffffffu;
  out[threadIdx.x] = __shfl_sync(mask, in[threadIdx.x], 3);
}

// Lanes exchange through shared memory: within one warp that needs __syncwarp.
__global__ void warp_exchange(const float* in, float* out) {
  NORMALIGN_SHARED(float, tile, [64]);
  tile[threadIdx.x] = in[threadIdx.x];
  if (!bad) __syncwarp();
  out[threadIdx.x] = tile[threadIdx.x ^ 1];
}

// Several blocks add to one number.
__global__ void accumulate(const float* in, float* out) {
  if (bad)
    out[0] += in[threadIdx.x];
  else
    atomicAdd(out, in[threadIdx.x]);
}

// Blocks write to one place.
__global__ void blocks_overlap(const float* in, float* out) {
  const int i = bad ? 0 : blockIdx.x;
  if (threadIdx.x == 0) out[i] = in[i];
}

// The block that finishes last reads what the others wrote.
__global__ void last_block(const float* in, float* out, float* rows, unsigned* finished) {
  NORMALIGN_SHARED(bool, last, [1]);
  rows[blockIdx.x * 64 + threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  if (threadIdx.x == 0) {
    if (!bad) __threadfence();
    last[0] = atomicAdd(finished, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last[0]) return;
  if (!bad) __threadfence();
  out[threadIdx.x] = rows[threadIdx.x] + rows[64 + threadIdx.x];
}

__global__ void too_much_shared(float* out) {
  NORMALIGN_SHARED(float, small, [6000]);
  small[threadIdx.x] = 1;
  out[threadIdx.x] = small[threadIdx.x];
  if (bad) {
    NORMALIGN_SHARED(float, large, [7000]);
    large[threadIdx.x] = 1;
    out[threadIdx.x] = large[threadIdx.x];
  }
}

int compare(const std::vector<float>& got, const std::vector<float>& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    if (got[i] == expected[i]) continue;
    std::printf("element %zu is %g, expected %g\n", i, got[i], expected[i]);
    return 1;
  }
  return 0;
}

int run(const std::string& name) {
  std::vector<float> in(128), same(64), reversed(64);
  for (int i = 0; i < 128; ++i) in[i] = static_cast<float>(i + 1);
  for (int i = 0; i < 64; ++i) same[i] = in[i];
  for (int i = 0; i < 64; ++i) reversed[i] = in[63 - i];
  std::vector<float> out(64, -1.0f), expected = same;
  const float* x = in.data();
  float* y = out.data();
  const dim3 one(1), block(64);
  if (name == "neighbour") {
    NORMALIGN_LAUNCH(neighbour, one, block, 0, nullptr, x, y);
    expected = reversed;
  } else if (name == "reuse") {
    NORMALIGN_LAUNCH(reuse, one, block, 0, nullptr, x, y);
    for (int i = 0; i < 64; ++i) expected[i] = in[63 - i] + in[127 - i];
  } else if (name == "divergent") {
    NORMALIGN_LAUNCH(divergent, one, block, 0, nullptr, x, y);
  } else if (name == "two_barriers") {
    NORMALIGN_LAUNCH(two_barriers, one, block, 0, nullptr, x, y);
  } else if (name == "past_the_end" || name == "store_past_the_end") {
    std::vector<float> a(in.begin(), in.begin() + 50), b(50, -1.0f);
    a.shrink_to_fit();
    if (name == "past_the_end")
      NORMALIGN_LAUNCH(past_the_end, one, block, 0, nullptr, a.data(), b.data(), 50);
    else
      NORMALIGN_LAUNCH(store_past_the_end, one, block, 0, nullptr, a.data(), b.data(), 50);
    return 0;
  } else if (name == "shared_bounds") {
    NORMALIGN_LAUNCH(shared_bounds, one, block, 0, nullptr, x, y);
  } else if (name == "dynamic_bounds") {
    NORMALIGN_LAUNCH(dynamic_bounds, one, block, 64 * sizeof(float), nullptr, x, y);
  } else if (name == "uninitialised") {
    NORMALIGN_LAUNCH(uninitialised, one, block, 0, nullptr, x, y);
  } else if (name == "lanes_left") {
    NORMALIGN_LAUNCH(lanes_left, one, block, 0, nullptr, x, y);
    for (int i = 0; i < 64; ++i) expected[i] = i < 32 ? 528.0f : 1552.0f;
  } else if (name == "mask_without_caller") {
    NORMALIGN_LAUNCH(mask_without_caller, one, block, 0, nullptr, x, y);
    for (int i = 0; i < 64; ++i) expected[i] = i < 32 ? 4.0f : 36.0f;
  } else if (name == "masks_disagree") {
    NORMALIGN_LAUNCH(masks_disagree, one, block, 0, nullptr, x, y);
    for (int i = 0; i < 64; ++i) expected[i] = i < 32 ? 4.0f : 36.0f;
  } else if (name == "warp_exchange") {
    NORMALIGN_LAUNCH(warp_exchange, one, block, 0, nullptr, x, y);
    for (int i = 0; i < 64; ++i) expected[i] = in[i ^ 1];
  } else if (name == "accumulate") {
    out.assign(1, 0.0f);
    y = out.data();
    NORMALIGN_LAUNCH(accumulate, dim3(2), block, 0, nullptr, x, y);
    expected.assign(1, 4160.0f);
  } else if (name == "blocks_overlap") {
    out.assign(2, -1.0f);
    y = out.data();
    NORMALIGN_LAUNCH(blocks_overlap, dim3(2), block, 0, nullptr, x, y);
    expected.assign(in.begin(), in.begin() + 2);
  } else if (name == "last_block") {
    std::vector<float> rows(128);
    unsigned finished = 0;
    NORMALIGN_LAUNCH(last_block, dim3(2), block, 0, nullptr, x, y, rows.data(), &finished);
    for (int i = 0; i < 64; ++i) expected[i] = 2 * in[i];
  } else if (name == "too_much_shared") {
    NORMALIGN_LAUNCH(too_much_shared, one, block, 0, nullptr, y);
    expected.assign(64, 1.0f);
  } else if (!run_matrix(name, bad, x, y, expected)) {
    throw std::invalid_argument("no kernel " + name);
  }
  return compare(out, expected);
}

}  // namespace
}  // namespace normalign

int main(int argc, char** argv) {
  if (argc == 2 && !std::strcmp(argv[1], "rounding")) return normalign::print_rounded(), 0;
  if (argc != 3) return 2;
  normalign::bad = !std::strcmp(argv[2], "bad");
  try {
    return normalign::run(argv[1]);
  } catch (const std::runtime_error& error) {
    std::printf("reported: %s\n", error.what());
    return 3;
  }
}
