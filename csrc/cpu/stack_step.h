// What the forward and the backward pass of a fused step share: addresses in the workspace, packed
// weights, and the product of a block's rows with one layer's weights.
#pragma once
#include "activation.h"
#include "stack_layout.h"

namespace normalign {
namespace {

template <class T>
struct Step {
  using V = typename Simd<T>::V;
  static constexpr int64_t PW = panel_width<T>();
  static constexpr int W = Simd<T>::width;

  const StackShape& shape;
  const StackCall<T>& call;
  const Layout<T> at;
  T* const base;

  Step(const StackShape& s, const StackCall<T>& c)
      : shape(s),
        call(c),
        at(s, c.batch, c.probes, c.criterion != StackCriterion::none, c.threads),
        base(reinterpret_cast<T*>(c.workspace)) {}

  // One block of rows.
  struct Block {
    T* p;
    int64_t index, first, rows;
  };
  Block block(int64_t b) const {
    const int64_t first = b * at.block_rows;
    return {base + at.first_block + b * at.block_size, b, first,
            smaller(at.block_rows, at.batch - first)};
  }
  // Panels of a block's matrix are this far apart.
  int64_t stride(const Block& k) const { return at.groups * k.rows * PW; }
  T* activation(const Block& k, int l, int64_t group) const {
    return k.p + at.activation[l] + group * k.rows * PW;
  }
  T* adjoint(const Block& k, int l, int64_t group) const {
    return k.p + at.adjoint[l] + group * k.rows * PW;
  }
  // Adjoints of the backward pass. The first layer's stand apart: s is scaled there.
  T* back(const Block& k, int l, int64_t group) const {
    return l == 1 ? k.p + at.back_first + group * k.rows * PW : adjoint(k, l, group);
  }
  int64_t panel_cols(int l, int64_t p) const { return smaller(PW, shape.width[l] - p * PW); }

  // ---- weights
  // Towards the output a layer's product has B = W^T (width[l] x width[l+1]), towards the input
  // B = W.
  void pack(int l, bool forward, int64_t p, int64_t k0, int64_t depth, T* out) const {
    const T* w = call.weight[l];
    const int64_t ld = shape.width[l];
    if (forward)
      pack_panel_transposed(panel_cols(l + 1, p), depth, w + p * PW * ld + k0, ld, out);
    else
      pack_panel(depth, panel_cols(l, p), w + k0 * ld + p * PW, ld, out);
  }
  T* resident(int l, bool forward, int64_t p) const {
    const int64_t K = forward ? shape.width[l] : shape.width[l + 1];
    return base + (forward ? at.packed_t[l] : at.packed_n[l]) + p * K * PW;
  }
  void pack_all(Team team) const {
    for (int l = 0; l < shape.layers; ++l) {
      for (int side = 0; side < 2; ++side) {
        const bool forward = side == 0;
        if (!at.resident || (!forward && call.probes == 0 && l == 0)) continue;
        const int64_t K = forward ? shape.width[l] : shape.width[l + 1];
        const int64_t n = panels<T>(shape.width[forward ? l + 1 : l]);
        for (int64_t p = team.begin(n); p < team.end(n); ++p)
          pack(l, forward, p, 0, K, resident(l, forward, p));
      }
      if (team.rank == 0 && shape.has_bias[l]) {
        T* b = base + at.bias[l];
        const int64_t n = shape.width[l + 1];
        for (int64_t j = 0; j < Layout<T>::padded(n); ++j) b[j] = j < n ? call.bias[l][j] : T(0);
      }
    }
    team.barrier();
  }
  const T* bias(int l, int64_t p) const {
    return shape.has_bias[l] ? base + at.bias[l] + p * PW : nullptr;
  }

  // The product of `groups` groups of rows, starting at `a`, with layer l's weights. make(p, g)
  // gives the epilogue of a panel and group; after(p) runs when a panel is complete.
  template <class Make, class After>
  void product(Team team, int l, bool forward, const Block& k, const T* a, int64_t groups,
               Make make, After after) const {
    const int to = forward ? l + 1 : l;
    const int64_t K = shape.width[forward ? l : l + 1];
    const int64_t n = panels<T>(shape.width[to]);
    const int64_t begin = team.begin(n), end = team.end(n), rows = k.rows;
    const auto run = [&](int64_t p, int64_t k0, int64_t depth, const T* b, T* partial) {
      for (int64_t g = 0; g < groups; ++g)
        nn_panel<T>(rows, panel_cols(to, p), depth, a + (k0 / PW) * stride(k) + g * rows * PW,
                    stride(k), b, partial + g * rows * PW, k0 == 0, k0 + depth == K, make(p, g));
    };
    if (at.resident) {
      for (int64_t p = begin; p < end; ++p) {
        run(p, 0, K, resident(l, forward, p), nullptr);
        after(p);
      }
    } else {
      T* packed = base + at.scratch + team.rank * at.scratch_size;
      T* partial = packed + kGroupPanels * PW * kDepth;
      for (int64_t p0 = begin; p0 < end; p0 += kGroupPanels) {
        const int64_t some = smaller(kGroupPanels, end - p0);
        for (int64_t k0 = 0; k0 < K; k0 += kDepth) {
          const int64_t depth = smaller(kDepth, K - k0);
          for (int64_t q = 0; q < some; ++q)
            pack(l, forward, p0 + q, k0, depth, packed + q * PW * kDepth);
          for (int64_t q = 0; q < some; ++q)
            run(p0 + q, k0, depth, packed + q * PW * kDepth, partial + q * groups * rows * PW);
        }
        for (int64_t q = 0; q < some; ++q) after(p0 + q);
      }
    }
    team.barrier();
  }
  template <class Make>
  void product(Team team, int l, bool forward, const Block& k, const T* a, int64_t groups,
               Make make) const {
    product(team, l, forward, k, a, groups, make, [](int64_t) {});
  }

  // Multiplication by the derivative of the activation behind layer l (l >= 1).
  void slope(const Block& k, int l, int64_t p, Epilogue<T>* e) const {
    switch (slope_of(shape.activation[l - 1])) {
      case Slope::one: break;
      case Slope::gate:
        e->finish = Finish::mask;
        e->gate = activation(k, l, 0) + p * stride(k);
        break;
      case Slope::array: e->finish = Finish::multiply; e->d1 = k.p + at.d1[l] + p * k.rows * PW;
    }
  }
  bool curved(int l) const { return is_curved(shape.activation[l - 1]); }
  const T* d2(const Block& k, int l, int64_t p) const {
    return shape.activation[l - 1] == Activation::square ? nullptr
                                                         : k.p + at.d2[l] + p * k.rows * PW;
  }
  T* kept(const Block& k, int l, int64_t p, int64_t probe) const {
    return k.p + at.kept[l] + (p * at.probes + probe) * k.rows * PW;
  }

  // A row-major matrix to one group of panels, or back.
  void to_panels(Team team, const Block& k, const T* src, int64_t ld, int64_t cols, T* out) const {
    const int64_t n = panels<T>(cols);
    for (int64_t p = team.begin(n); p < team.end(n); ++p)
      pack_panel(k.rows, cols - p * PW, src + p * PW, ld, out + p * stride(k));
  }
};

}  // namespace
}  // namespace normalign
