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

  // ---- forward
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
      if (shape.penalty == StackPenalty::joint) {
        total = __builtin_sqrt(total);
        k.p[at.norm + i] = total;
      }
      k.p[at.sample_penalty + i] = total;
    }
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

  // ---- backward
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

  void weight_gradients(Team team, int64_t index, bool penalty) const {
    const Block k = block(index);
    for (int l = 0; l < shape.layers; ++l) {
      const bool offset = penalty && at.offset_chain;
      const int64_t n = shape.width[l], m = shape.width[l + 1];
      const int64_t K = (penalty ? 1 + at.probes + (offset && l > 0 ? 1 : 0) : 1) * k.rows;
      const int64_t nq = panels<T>(m), items = panels<T>(n) * nq;
      const T* d = back(k, l + 1, 0);
      if (T* out = call.grad_weight[l]) {
        for (int64_t t = team.begin(items); t < team.end(items); ++t) {
          const int64_t p = t / nq, q = t % nq;
          tn_panel<T>(panel_cols(l + 1, q), panel_cols(l, p), K, d + q * stride(k),
                      activation(k, l, 0) + p * stride(k), out + q * PW * n + p * PW, n, index > 0);
        }
      }
      if (T* out = call.grad_bias[l])
        for (int64_t q = team.begin(nq); q < team.end(nq); ++q) {
          column_sum(k.rows, d + q * stride(k), panel_cols(l + 1, q), out + q * PW, index > 0);
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

  // ---- threads
  // f(team) on every thread, as one team.
  template <class F>
  void together(F f) const {
    if (call.threads <= 1) {
      f(Team{0, 1});
      return;
    }
#pragma omp parallel num_threads(call.threads)
    f(Team{thread_number(), team_size()});
  }
  static int thread_number();
  static int team_size();

  void forward() const {
    together([this](Team team) {
      pack_all(team);
      for (int64_t b = 0; b < at.blocks; ++b) {
        if (!at.resident)
          forward_block(team, b);
        else if (b % team.size == team.rank)
          forward_block(Team{0, 1}, b);
      }
    });
    results();
  }

  void backward() const {
    const bool penalty = penalty_counts();
    together([this, penalty](Team team) {
      const bool own_blocks = at.resident && team.size > 1;
      for (int64_t b = 0; b < at.blocks; ++b) {
        if (!own_blocks) {
          backward_block(team, b, penalty);
          weight_gradients(team, b, penalty);
        } else if (b % team.size == team.rank) {
          backward_block(Team{0, 1}, b, penalty);
        }
      }
      if (!own_blocks) return;
      team.barrier();
      for (int64_t b = 0; b < at.blocks; ++b) weight_gradients(team, b, penalty);
    });
  }
};

}  // namespace
}  // namespace normalign

#if defined(_OPENMP)
extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);
#endif

namespace normalign {
namespace {

template <class T>
int Step<T>::thread_number() {
#if defined(_OPENMP)
  return omp_get_thread_num();
#else
  return 0;
#endif
}
template <class T>
int Step<T>::team_size() {
#if defined(_OPENMP)
  return omp_get_num_threads();
#else
  return 1;
#endif
}

template <class T>
int64_t workspace(const StackShape& s, int64_t batch, int probes, bool criterion, int threads) {
  return Layout<T>(s, batch, probes, criterion, threads).total * static_cast<int64_t>(sizeof(T));
}
template <class T>
void forward(const StackShape& s, const StackCall<T>& c) {
  Step<T>(s, c).forward();
}
template <class T>
void backward(const StackShape& s, const StackCall<T>& c) {
  Step<T>(s, c).backward();
}

}  // namespace

extern const GrokalignStackTable NORMALIGN_VARIANT(grokalign_stack) = {
    workspace<float>, workspace<double>, forward<float>,
    forward<double>,  backward<float>,   backward<double>};

}  // namespace normalign
