// Where everything of a fused step lies in its workspace, and how threads share the work.
#pragma once
#include "grokalign_stack.h"
#include "panel.h"

namespace normalign {
namespace {

// Weights whose two packed copies fit here are packed once a step and stay; rows are then cut in
// blocks whose whole chain stays in the second-level cache, and threads take blocks. Larger
// weights are packed piece by piece while they are used, and threads share every product.
constexpr int64_t kResidentBytes = 8 << 20;
constexpr int64_t kResidentStackedRows = 224;  // rows of all groups of a block
constexpr int64_t kStreamedStackedRows = 1024;
constexpr int64_t kBlocksPerLane = 4;
constexpr int64_t kMostLanes = 16;
constexpr int64_t kDepth = 256;      // columns of A in one piece of a streamed product
constexpr int64_t kGroupPanels = 8;  // panels of B packed together

NORMALIGN_INLINE int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
NORMALIGN_INLINE int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}
NORMALIGN_INLINE int64_t larger(int64_t a, int64_t b) {
  return a > b ? a : b;
}

// What a layer's activation asks for in the backward passes.
enum class Slope { one, gate, array };

NORMALIGN_INLINE Slope slope_of(Activation a) {
  return a == Activation::identity ? Slope::one
         : a == Activation::relu   ? Slope::gate
                                   : Slope::array;
}
NORMALIGN_INLINE bool is_curved(Activation a) {
  return a != Activation::identity && a != Activation::relu && a != Activation::leaky_relu;
}

// A block of rows keeps, for each layer, `groups` groups of rows one after the other:
//   activations A_l (l < layers):   a, then the tangent of each probe, then the offset chain
//   adjoints    D_l (l >= 1):       delta, then s of each probe, then the offset's adjoint
// so that each weight gradient D_{l+1}^T A_l is one product over all of them.
template <class T>
struct Layout {
  int layers;
  int64_t batch, probes, groups, block_rows, blocks;
  bool resident, offset_chain;
  int64_t activation[kMaxStackLayers], adjoint[kMaxStackLayers + 1];  // in a block
  int64_t d1[kMaxStackLayers], d2[kMaxStackLayers], kept[kMaxStackLayers];
  double degree_offset;  // 1 - k for a stack without bias that is homogeneous of degree k
  int64_t back_first, offset, row_scale, norm, sample_penalty, sample_task, task_adjoint,
      block_size;  // in a block; its size
  int64_t packed_t[kMaxStackLayers], packed_n[kMaxStackLayers];
  int64_t bias[kMaxStackLayers];
  int64_t lanes, lane_weight[kMaxStackLayers], lane_bias[kMaxStackLayers], lane_first, lane_size;
  int64_t scratch, scratch_size, first_block, total;  // in elements

  Layout(const StackShape& s, int64_t batch_, int64_t probes_, bool criterion, int threads)
      : layers(s.layers), batch(batch_), probes(probes_) {
    constexpr int64_t PW = panel_width<T>();
    int64_t pack = 0;
    bool has_bias = false;
    for (int l = 0; l < layers; ++l) {
      pack += padded(s.width[l + 1]) * s.width[l] + padded(s.width[l]) * s.width[l + 1];
      has_bias = has_bias || s.has_bias[l];
    }
    // Without bias a stack of linear pieces and squares is homogeneous, f(t x) = t^k f(x) for
    // t > 0, so that J x = k f(x) by Euler's theorem: the offset f(x) - J x needs no pass.
    double degree = 1;
    for (int l = 0; l < layers; ++l) degree *= s.activation[l] == Activation::square ? 2 : 1;
    degree_offset = s.penalty == StackPenalty::joint && !has_bias && probes > 0 ? 1 - degree : 0;
    offset_chain = s.penalty == StackPenalty::joint && has_bias && probes > 0;
    groups = 1 + probes + (offset_chain ? 1 : 0);
    resident = pack * static_cast<int64_t>(sizeof(T)) <= kResidentBytes;
    const int64_t stacked = resident ? kResidentStackedRows : kStreamedStackedRows;
    const int64_t most = larger(stacked / groups, kTileRows);
    blocks = ceil_div(batch, most);
    if (resident && blocks > 1) blocks += blocks % 2;  // even: two threads get equal shares
    block_rows = ceil_div(batch, larger(blocks, 1));
    blocks = block_rows ? ceil_div(batch, block_rows) : 0;

    int64_t at = 0;
    const auto take = [&at](int64_t elements) {
      const int64_t start = at;
      constexpr int64_t line = 64 / sizeof(T);
      at += (elements + line - 1) / line * line;
      return start;
    };
    for (int l = 0; l < layers; ++l) bias[l] = take(padded(s.width[l + 1]));
    for (int l = 0; l < layers; ++l) {
      packed_t[l] = resident ? take(padded(s.width[l + 1]) * s.width[l]) : 0;
      packed_n[l] = resident ? take(padded(s.width[l]) * s.width[l + 1]) : 0;
    }
    // Blocks are summed into weight gradients in `lanes` parts, which are added at the end: a
    // thread then uses its blocks while they are in its cache. The number depends on the batch
    // alone, so that threads change no bit. The first part is the result itself.
    lanes = resident ? smaller(larger(blocks / kBlocksPerLane, 1), kMostLanes) : 1;
    lane_first = at;
    for (int l = 0; l < layers; ++l) {
      lane_weight[l] = take(s.width[l + 1] * s.width[l]) - lane_first;
      lane_bias[l] = take(s.width[l + 1]) - lane_first;
    }
    lane_size = at - lane_first;
    at = lane_first + lane_size * (lanes - 1);
    scratch = at;
    scratch_size = resident ? 0 : kGroupPanels * PW * (kDepth + groups * block_rows);
    at += scratch_size * threads;
    first_block = at;
    at = 0;
    const int64_t rows = groups * block_rows;
    for (int l = 0; l < layers; ++l) activation[l] = take(padded(s.width[l]) * rows);
    for (int l = 1; l <= layers; ++l) adjoint[l] = take(padded(s.width[l]) * rows);
    for (int l = 1; l < layers; ++l) {
      const Activation a = s.activation[l - 1];
      const int64_t size = padded(s.width[l]) * block_rows;
      d1[l] = slope_of(a) == Slope::array ? take(size) : 0;
      d2[l] = is_curved(a) && a != Activation::square ? take(size) : 0;
      kept[l] = is_curved(a) ? take(size * probes) : 0;
    }
    back_first = take(padded(s.width[1]) * rows);
    offset = offset_chain || degree_offset != 0 ? take(padded(s.width[layers]) * block_rows) : 0;
    row_scale = take(block_rows);
    norm = take(block_rows);
    sample_penalty = take(block_rows);
    sample_task = take(block_rows);
    task_adjoint = criterion ? take(block_rows * s.width[layers]) : 0;
    block_size = at;
    total = first_block + block_size * blocks;
  }

  int64_t lane_begin(int64_t lane) const { return blocks * lane / lanes; }

  static int64_t padded(int64_t cols) { return panels<T>(cols) * panel_width<T>(); }
};

// The threads that work on one thing together. A team of one needs no barriers.
struct Team {
  int rank, size;
  void barrier() const {
    if (size > 1) {
#pragma omp barrier
    }
  }
  // This member's share of `count` items.
  int64_t begin(int64_t count) const { return count * rank / size; }
  int64_t end(int64_t count) const { return count * (rank + 1) / size; }
};

}  // namespace
}  // namespace normalign
