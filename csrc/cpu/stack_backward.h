// The backward half of a fused step: tangents, adjoints, gradients of weights and biases.
#pragma once
#include "stack_step.h"

namespace normalign {
namespace {

template <class T>
struct Backward : Step<T> {
  using Block = typename Step<T>::Block;
  using V = typename Step<T>::V;
  using Step<T>::PW;
  using Step<T>::W;
  using Step<T>::shape;
  using Step<T>::call;
  using Step<T>::at;
  using Step<T>::activation;
  using Step<T>::adjoint;
  using Step<T>::block;
  using Step<T>::curved;
  using Step<T>::kept;
  using Step<T>::panel_cols;
  using Step<T>::product;
  using Step<T>::slope;
  using Step<T>::stride;
  using Step<T>::to_panels;
  using Step<T>::back;
  using Step<T>::base;
  using Step<T>::d2;
  using Step<T>::Step;

  bool penalty_counts() const {
    return at.probes > 0 && (call.grad_penalty != nullptr || call.grad_total != nullptr);
  }
  // d loss / d penalty of sample i.
  T grad_penalty(int64_t i) const {
    if (call.grad_total) return *call.grad_total * call.penalty_weight / static_cast<T>(at.batch);
    return call.per_sample ? call.grad_penalty[i] : *call.grad_penalty / static_cast<T>(at.batch);
  }
  // d penalty_i / d g = row_scale_i * r.
  void row_scales(const Block& k) const {
    T* scale = k.p + at.row_scale;
    for (int64_t i = 0; i < k.rows; ++i) {
      scale[i] = grad_penalty(k.first + i) / static_cast<T>(at.probes);
      if (shape.penalty != StackPenalty::joint) {
        scale[i] *= T(2);
      } else {
        const T norm = k.p[at.norm + i];
        scale[i] = norm == T(0) ? T(0) : scale[i] / norm;  // the root's subgradient at J = 0
      }
    }
  }

  void tangent_layers(Team team, const Block& k) const {
    for (int l = 0; l + 1 < shape.layers; ++l)
      product(team, l, true, k, activation(k, l, 1), at.probes, [&](int64_t p, int64_t g) {
        Epilogue<T> e;
        e.c = activation(k, l + 1, 1 + g) + p * stride(k);
        slope(k, l + 1, p, &e);
        if (l == 0) e.row_scale = k.p + at.row_scale;
        if (curved(l + 1)) {
          e.finish = Finish::tangent;
          e.d2 = d2(k, l + 1, p);
          e.d2_constant = T(2);
          e.kept = kept(k, l + 1, p, g);
          e.curve = back(k, l + 1, 0) + p * stride(k);
          e.curve_adds = g > 0;
        }
        return e;
      });
  }

  void adjoint_layers(Team team, const Block& k, bool penalty) const {
    const bool offset = penalty && at.offset_chain;
    const int64_t z = 1 + at.probes;
    for (int l = shape.layers - 1; l >= 1; --l) {
      const auto make = [&](int64_t group) {
        return [this, &k, l, group, penalty](int64_t p, int64_t) {
          Epilogue<T> e;
          e.c = back(k, l, group) + p * stride(k);
          slope(k, l, p, &e);
          if (group == 0 && penalty && curved(l)) e.finish = Finish::adjoint;
          return e;
        };
      };
      product(team, l, false, k, back(k, l + 1, 0), 1, make(0));
      if (offset) product(team, l, false, k, back(k, l + 1, z), 1, make(z));
    }
  }

  void output_adjoints(Team team, const Block& k, bool penalty) const {
    const int64_t c = shape.width[shape.layers], n = panels<T>(c);
    T* delta = back(k, shape.layers, 0);
    if (call.grad_total) {
      to_panels(team, k, k.p + at.task_adjoint, c, c, delta);
      const V scale = splat(*call.grad_total);
      for (int64_t p = team.begin(n); p < team.end(n); ++p)
        for (int64_t j = 0; j < k.rows * PW; j += W) {
          T* at_j = delta + p * stride(k) + j;
          store(at_j, load(at_j) * scale);
        }
    } else if (call.grad_logits) {
      to_panels(team, k, call.grad_logits + k.first * c, c, c, delta);
    } else {
      for (int64_t p = team.begin(n); p < team.end(n); ++p)
        for (int64_t j = 0; j < k.rows * PW; ++j) delta[p * stride(k) + j] = T(0);
    }
    if (penalty && at.degree_offset != 0) {
      const T factor = 2 * static_cast<T>(at.degree_offset);
      for (int64_t p = team.begin(n); p < team.end(n); ++p)
        for (int64_t i = 0; i < k.rows; ++i)
          for (int64_t j = 0; j < PW; ++j)
            delta[p * stride(k) + i * PW + j] +=
                factor * grad_penalty(k.first + i) * k.p[at.offset + (p * k.rows + i) * PW + j];
    }
    if (!(penalty && at.offset_chain)) return;
    T* eta = back(k, shape.layers, 1 + at.probes);
    for (int64_t p = team.begin(n); p < team.end(n); ++p)
      for (int64_t i = 0; i < k.rows; ++i)
        for (int64_t j = 0; j < PW; ++j)
          eta[p * stride(k) + i * PW + j] =
              2 * grad_penalty(k.first + i) * k.p[at.offset + (p * k.rows + i) * PW + j];
  }

  // The first layer's s, scaled as its tangents' products were.
  void scale_first_adjoints(Team team, const Block& k) const {
    const T* scale = k.p + at.row_scale;
    const int64_t n = panels<T>(shape.width[1]);
    for (int64_t p = team.begin(n); p < team.end(n); ++p)
      for (int64_t h = 1; h <= at.probes; ++h) {
        const T* s = adjoint(k, 1, h) + p * stride(k);
        T* out = back(k, 1, h) + p * stride(k);
        for (int64_t i = 0; i < k.rows; ++i)
          for (int64_t j = 0; j < PW; j += W)
            store(out + i * PW + j, load(s + i * PW + j) * scale[i]);
      }
  }

  // A lane's part of a gradient; null where it is not wanted.
  T* grad_weight(int64_t lane, int l) const {
    if (lane == 0 || !call.grad_weight[l]) return call.grad_weight[l];
    return base + at.lane_first + (lane - 1) * at.lane_size + at.lane_weight[l];
  }
  T* grad_bias(int64_t lane, int l) const {
    if (lane == 0 || !call.grad_bias[l]) return call.grad_bias[l];
    return base + at.lane_first + (lane - 1) * at.lane_size + at.lane_bias[l];
  }
  void add_lanes(Team team) const {
    for (int l = 0; l < shape.layers; ++l) {
      const int64_t m = shape.width[l + 1], n = m * shape.width[l];
      for (int64_t lane = 1; lane < at.lanes; ++lane) {
        add(team, n, grad_weight(lane, l), call.grad_weight[l]);
        add(team, m, grad_bias(lane, l), call.grad_bias[l]);
      }
    }
  }
  static void add(Team team, int64_t n, const T* part, T* sum) {
    if (!sum) return;
    for (int64_t i = team.begin(n); i < team.end(n); ++i) sum[i] += part[i];
  }

  void weight_gradients(Team team, int64_t lane, int64_t index, bool penalty) const {
    const Block k = block(index);
    const bool accumulate = index > at.lane_begin(lane);
    for (int l = 0; l < shape.layers; ++l) {
      const bool offset = penalty && at.offset_chain;
      const int64_t n = shape.width[l], m = shape.width[l + 1];
      const int64_t K = (penalty ? 1 + at.probes + (offset && l > 0 ? 1 : 0) : 1) * k.rows;
      const int64_t nq = panels<T>(m), items = panels<T>(n) * nq;
      const T* d = back(k, l + 1, 0);
      if (T* out = grad_weight(lane, l)) {
        for (int64_t t = team.begin(items); t < team.end(items); ++t) {
          const int64_t p = t / nq, q = t % nq;
          tn_panel<T>(panel_cols(l + 1, q), panel_cols(l, p), K, d + q * stride(k),
                      activation(k, l, 0) + p * stride(k), out + q * PW * n + p * PW, n,
                      accumulate);
        }
      }
      if (T* out = grad_bias(lane, l))
        for (int64_t q = team.begin(nq); q < team.end(nq); ++q) {
          column_sum(k.rows, d + q * stride(k), panel_cols(l + 1, q), out + q * PW, accumulate);
          if (offset)
            column_sum(k.rows, d + q * stride(k) + (1 + at.probes) * k.rows * PW,
                       panel_cols(l + 1, q), out + q * PW, true);
        }
    }
  }
  static void column_sum(int64_t rows, const T* panel, int64_t cols, T* out, bool accumulate) {
    V s0{}, s1{};
    for (int64_t i = 0; i < rows; ++i, panel += PW) {
      s0 += load(panel);
      s1 += load(panel + W);
    }
    store_n(out, accumulate ? s0 + load_n(out, cols) : s0, cols);
    store_n(out + W, accumulate ? s1 + load_n(out + W, cols - W) : s1, cols - W);
  }

  void backward_block(Team team, int64_t index, bool penalty) const {
    const Block k = block(index);
    if (penalty) {
      if (team.rank == 0) row_scales(k);
      team.barrier();
      tangent_layers(team, k);
    }
    output_adjoints(team, k, penalty);
    team.barrier();
    adjoint_layers(team, k, penalty);
    if (penalty) scale_first_adjoints(team, k);
    team.barrier();
  }
};

}  // namespace
}  // namespace normalign
