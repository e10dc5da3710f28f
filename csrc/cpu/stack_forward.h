// The forward half of a fused step: layers, task loss, probes, projection, offset, results.
#pragma once
#include "stack_step.h"

namespace normalign {
namespace {

template <class T>
struct Forward : Step<T> {
  using Block = typename Step<T>::Block;
  using V = typename Step<T>::V;
  using Step<T>::PW;
  using Step<T>::W;
  using Step<T>::shape;
  using Step<T>::call;
  using Step<T>::at;
  using Step<T>::activation;
  using Step<T>::adjoint;
  using Step<T>::bias;
  using Step<T>::block;
  using Step<T>::curved;
  using Step<T>::kept;
  using Step<T>::panel_cols;
  using Step<T>::product;
  using Step<T>::slope;
  using Step<T>::stride;
  using Step<T>::to_panels;
  using Step<T>::Step;

  void forward_layers(Team team, const Block& k) const {
    to_panels(team, k, call.x + k.first * call.x_stride, call.x_stride, shape.width[0],
              activation(k, 0, 0));
    team.barrier();
    for (int l = 0; l + 1 < shape.layers; ++l) {
      const Activation kind = shape.activation[l];
      const bool array = slope_of(kind) == Slope::array;
      product(
          team, l, true, k, activation(k, l, 0), 1,
          [&](int64_t p, int64_t) {
            Epilogue<T> e;
            e.finish = kind == Activation::relu ? Finish::relu : Finish::store;
            e.bias = bias(l, p);
            e.c = array ? k.p + at.d1[l + 1] + p * k.rows * PW
                        : activation(k, l + 1, 0) + p * stride(k);
            return e;
          },
          [&](int64_t p) {
            if (!array) return;
            T* bend = curved(l + 1) && kind != Activation::square
                          ? k.p + at.d2[l + 1] + p * k.rows * PW
                          : nullptr;
            activate(kind, shape.p0[l], shape.p1[l], k.rows * PW,
                     k.p + at.d1[l + 1] + p * k.rows * PW, activation(k, l + 1, 0) + p * stride(k),
                     bend);
          });
    }
    const int last = shape.layers - 1;
    T* out = adjoint(k, shape.layers, 0);  // free until the backward pass
    product(
        team, last, true, k, activation(k, last, 0), 1,
        [&](int64_t p, int64_t) {
          Epilogue<T> e;
          e.bias = bias(last, p);
          e.c = out + p * stride(k);
          return e;
        },
        [&](int64_t p) { unpack(k, out + p * stride(k), p, call.logits); });
  }
  void unpack(const Block& k, const T* panel, int64_t p, T* dst) const {
    const int64_t c = shape.width[shape.layers], cols = panel_cols(shape.layers, p);
    for (int64_t i = 0; i < k.rows; ++i, panel += PW) {
      T* row = dst + (k.first + i) * c + p * PW;
      store_n(row, load(panel), cols);
      store_n(row + W, load(panel + W), cols - W);
    }
  }

  // g = J^T v for each probe, into the tangent groups of the first layer's activations.
  void probe_layers(Team team, const Block& k) const {
    const int64_t c = shape.width[shape.layers];
    for (int64_t h = 0; h < at.probes; ++h)
      to_panels(team, k, call.probe + (h * at.batch + k.first) * c, c, c,
                adjoint(k, shape.layers, 1 + h));
    team.barrier();
    for (int l = shape.layers - 1; l >= 0; --l)
      product(team, l, false, k, adjoint(k, l + 1, 1), at.probes, [&](int64_t p, int64_t g) {
        Epilogue<T> e;
        e.c = (l ? adjoint(k, l, 1 + g) : activation(k, 0, 1 + g)) + p * stride(k);
        if (l) slope(k, l, p, &e);
        if (l && curved(l)) {
          e.finish = Finish::probe;
          e.kept = kept(k, l, p, g);
        }
        return e;
      });
  }

  // sum over the columns of a row of f(j): j is the offset of a vector.
  template <class F>
  T row_sum(const Block& k, int64_t cols, F f) const {
    V s0{}, s1{};
    int64_t j = 0;
    for (; cols > W; cols -= PW, j += stride(k)) {
      s0 += f(j);
      s1 += f(j + W);
    }
    if (cols > 0) s0 += f(j);  // a panel's second vector holds nothing when one is enough
    return lane_sum<T>(s0 + s1);
  }

  // Projects each g in place, and gives each sample's penalty.
  void project(Team team, const Block& k) const {
    const int64_t d = shape.width[0];
    const T share = T(1) / static_cast<T>(at.probes);
    for (int64_t i = team.begin(k.rows); i < team.end(k.rows); ++i) {
      const T* x = activation(k, 0, 0) + i * PW;
      T xx = T(0), total = T(0);
      const bool orthogonal = shape.penalty == StackPenalty::orthogonal;
      if (orthogonal) xx = row_sum(k, d, [&](int64_t j) { return load(x + j) * load(x + j); });
      for (int64_t h = 0; h < at.probes; ++h) {
        T* g = activation(k, 0, 1 + h) + i * PW;
        T s = T(0);
        if (orthogonal && !(xx == T(0)))
          s = row_sum(k, d, [&](int64_t j) { return load(g + j) * load(x + j); }) / xx;
        const V sv = splat(s);
        total += row_sum(k, d, [&](int64_t j) {
          V r = load(g + j);
          if (orthogonal) {
            r -= sv * load(x + j);
            store(g + j, r);
          }
          return r * r;
        });
      }
      total *= share;
      if (shape.penalty == StackPenalty::joint) total = k.p[at.norm + i] = root(k, i, total);
      k.p[at.sample_penalty + i] = total;
    }
  }

  // The square root of a sample's mean square, scaled where the squares leave the range of T: small
  // Jacobians keep their gradient.
  T root(const Block& k, int64_t i, T square) const {
    if (square > T(sizeof(T) == 4 ? 1e-30 : 1e-280) && square < T(1e30))
      return __builtin_sqrt(square);
    const int64_t d = shape.width[0];
    T top = T(0);
    for (int64_t h = 0; h < at.probes; ++h) {
      const T* g = activation(k, 0, 1 + h) + i * PW;
      for (int64_t j = 0; j < d; ++j) {
        const T size = __builtin_fabs(g[(j / PW) * stride(k) + j % PW]);
        top = size > top || size != size ? size : top;
      }
    }
    if (!(top > T(0)) || top * T(0) != T(0)) return top;  // 0, NaN, infinity
    T sum = T(0);
    for (int64_t h = 0; h < at.probes; ++h) {
      const T* g = activation(k, 0, 1 + h) + i * PW;
      for (int64_t j = 0; j < d; ++j) {
        const T part = g[(j / PW) * stride(k) + j % PW] / top;
        sum += part * part;
      }
    }
    return top * __builtin_sqrt(sum / static_cast<T>(at.probes));
  }

  // f(x) - J x: the biases' way through the active linear pieces.
  void offset_layers(Team team, const Block& k) const {
    const int64_t z = 1 + at.probes, last = shape.layers - 1;
    for (int l = 0; l < shape.layers; ++l) {
      const auto make = [&](int64_t p, int64_t) {
        Epilogue<T> e;
        e.bias = bias(l, p);
        e.c =
            l == last ? k.p + at.offset + p * k.rows * PW : activation(k, l + 1, z) + p * stride(k);
        if (l < last) slope(k, l + 1, p, &e);
        return e;
      };
      if (l) {
        product(team, l, true, k, activation(k, l, z), 1, make);
        continue;
      }
      const int64_t n = panels<T>(shape.width[1]);  // the chain starts from 0: no product
      for (int64_t p = team.begin(n); p < team.end(n); ++p) {
        const Epilogue<T> e = make(p, 0);
        for (int64_t i = 0; i < k.rows; ++i) {
          V zero[1][2] = {};
          finish_tile<T, 1, 2>(zero, e, i);
        }
      }
      team.barrier();
    }
  }

  // The same for a homogeneous stack: a multiple of the logits, which still lie in panels.
  void homogeneous_offset(Team team, const Block& k) const {
    const T* logits = adjoint(k, shape.layers, 0);
    const T factor = static_cast<T>(at.degree_offset);
    const int64_t n = panels<T>(shape.width[shape.layers]);
    for (int64_t p = team.begin(n); p < team.end(n); ++p)
      for (int64_t j = 0; j < k.rows * PW; ++j)
        k.p[at.offset + p * k.rows * PW + j] = factor * logits[p * stride(k) + j];
    team.barrier();
  }

  void add_squared_offset(Team team, const Block& k) const {
    const int64_t c = shape.width[shape.layers];
    for (int64_t i = team.begin(k.rows); i < team.end(k.rows); ++i)
      for (int64_t j = 0; j < c; ++j) {
        const T o = k.p[at.offset + ((j / PW) * k.rows + i) * PW + j % PW];
        k.p[at.sample_penalty + i] += o * o;
      }
  }

  void forward_block(Team team, int64_t index) const {
    const Block k = block(index);
    forward_layers(team, k);
    if (call.criterion != StackCriterion::none) task_loss(team, k);
    if (at.probes == 0) return;
    probe_layers(team, k);
    project(team, k);
    team.barrier();
    if (at.offset_chain) offset_layers(team, k);
    if (at.degree_offset != 0) homogeneous_offset(team, k);
    if (at.offset_chain || at.degree_offset != 0) add_squared_offset(team, k);
    team.barrier();
  }

  // Each sample's share of the task loss, and its gradient by the logits.
  void task_loss(Team team, const Block& k) const {
    const int64_t c = shape.width[shape.layers];
    for (int64_t i = team.begin(k.rows); i < team.end(k.rows); ++i) {
      const T* z = call.logits + (k.first + i) * c;
      T* d = k.p + at.task_adjoint + i * c;
      T sum = T(0);
      if (call.criterion == StackCriterion::squared_error) {
        const T* y = call.target_value + (k.first + i) * c;
        for (int64_t j = 0; j < c; ++j) {
          const T error = z[j] - y[j];
          sum += error * error;
          d[j] = 2 * call.task_scale * error;
        }
        k.p[at.sample_task + i] = sum;
        continue;
      }
      const int64_t y = call.target_class[k.first + i];
      const bool counts = y != call.ignore_index;
      T top = z[0];
      for (int64_t j = 1; j < c; ++j) top = z[j] > top || z[j] != z[j] ? z[j] : top;
      for (int64_t j = 0; j < c; j += W) {
        const V e = vexp<T>(load_n(z + j, c - j) - splat(top));
        store_n(d + j, e, c - j);
        sum += lane_sum<T>(j + W <= c ? e : first_lanes(e, c - j));
      }
      const T scale = counts ? call.task_scale / sum : T(0);
      for (int64_t j = 0; j < c; ++j) d[j] *= scale;
      if (counts) d[y] -= call.task_scale;
      k.p[at.sample_task + i] = counts ? top - z[y] + natural_log(sum) : T(0);
    }
  }
  static V first_lanes(V v, int64_t n) {
    for (int64_t j = n; j < W; ++j) v[j] = T(0);
    return v;
  }
  static T natural_log(T x) {
    return sizeof(T) == 4 ? static_cast<T>(__builtin_logf(static_cast<float>(x)))
                          : static_cast<T>(__builtin_log(static_cast<double>(x)));
  }

  // In the order of the rows, whatever the number of threads.
  T over_samples(int64_t what) const {
    T sum = T(0);
    for (int64_t b = 0; b < at.blocks; ++b) {
      const Block k = block(b);
      T some = T(0);
      for (int64_t i = 0; i < k.rows; ++i) some += k.p[what + i];
      sum += some;
    }
    return sum;
  }
  void results() const {
    if (at.probes > 0 && call.per_sample) {
      for (int64_t b = 0; b < at.blocks; ++b) {
        const Block k = block(b);
        for (int64_t i = 0; i < k.rows; ++i) call.penalty[k.first + i] = k.p[at.sample_penalty + i];
      }
    } else if (at.probes > 0) {
      *call.penalty = over_samples(at.sample_penalty) / static_cast<T>(at.batch);
    }
    if (call.criterion == StackCriterion::none) return;
    *call.task = over_samples(at.sample_task) * call.task_scale;
    *call.total = *call.task;
    if (at.probes > 0) *call.total += call.penalty_weight * *call.penalty;
  }
};

}  // namespace
}  // namespace normalign
