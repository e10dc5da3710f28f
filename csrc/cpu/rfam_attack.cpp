#include "rfam_attack.h"

#include "point_panel.h"
#include "threads.h"

namespace normalign {
namespace {

// All arrays of one block of 48 points are [row][lane].

// xc (d, P) -> u (r, P). Sums of 64 terms at a time keep long ones accurate.
template <class T>
void project_lanes(int64_t d, int64_t r, int64_t lanes, const T* xc, const T* factor, T* u) {
  constexpr int64_t depth = 64;
  for (int64_t e = 0; e < r * P; ++e) u[e] = T(0);
  for (int64_t from = 0; from < d; from += depth)
    multiply<T, Store::add>(r, lanes, least(depth, d - from), factor + from * r, 1, r,
                            xc + from * P, P, u, P);
}

template <class T>
void project(int64_t m, int64_t d, int64_t r, const T* x, int64_t ldx, const T* mean,
             const T* factor, T* u, T* workspace, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && m * d > 16384)
  for (int64_t i = 0; i < panels_of(m); ++i) {
    T* xc = workspace + thread_index() * P * (d + r);
    T* lanes = xc + P * d;
    const int64_t rows = least(P, m - i * P);
    for (int64_t t = 0; t < d; ++t) {
      for (int64_t l = 0; l < rows; ++l) xc[t * P + l] = x[(i * P + l) * ldx + t] - mean[t];
      for (int64_t l = rows; l < P; ++l) xc[t * P + l] = T(0);
    }
    project_lanes(d, r, rows, xc, factor, lanes);
    for (int64_t l = 0; l < rows; ++l)
      for (int64_t t = 0; t < r; ++t) u[(i * P + l) * r + t] = lanes[t * P + l];
  }
}

// Of M rows and N vectors of a tile: w_jl becomes w_jl sum_k coef_jk v_kl, which total_l counts.
template <class T, int M, int N>
NORMALIGN_INLINE void weigh_block(int64_t c, const T* coef, const T* v, T* w, T* total) {
  using V = typename Simd<T>::V;
  constexpr int W = Simd<T>::width;
  V sum[M][N];
  NORMALIGN_UNROLL
  for (int i = 0; i < M; ++i) NORMALIGN_UNROLL
  for (int n = 0; n < N; ++n) sum[i][n] = V{};
  for (int64_t k = 0; k < c; ++k) {
    NORMALIGN_UNROLL
    for (int i = 0; i < M; ++i) {
      const V a = splat(coef[i * c + k]);
      NORMALIGN_UNROLL
      for (int n = 0; n < N; ++n) sum[i][n] += a * load(v + k * P + n * W);
    }
  }
  NORMALIGN_UNROLL
  for (int n = 0; n < N; ++n) {
    V all = load(total + n * W);
    NORMALIGN_UNROLL
    for (int i = 0; i < M; ++i) {
      T* at = w + i * P + n * W;
      sum[i][n] *= load(at);
      store(at, sum[i][n]);
      all += sum[i][n];
    }
    store(total + n * W, all);
  }
}

template <class T, int N>
void weigh_columns(int64_t columns, int64_t c, const T* coef, const T* v, T* w, T* total) {
  constexpr int M = Tiling<T>::M;
  int64_t j = 0;
  for (; j + M <= columns; j += M) weigh_block<T, M, N>(c, coef + j * c, v, w + j * P, total);
  for (; j < columns; ++j) weigh_block<T, 1, N>(c, coef + j * c, v, w + j * P, total);
}

// Adds one tile to g (r, P): sum_j W_j (sum_k v_k a_jk) z_j, and the sum of its weights to `total`,
// for the first `lanes` points, rounded up to whole vectors. w becomes scratch.
template <class T>
void add_gradient(const AttackedMachine<T>& machine, int64_t j, int64_t lanes, const T* v, T* w,
                  T* g, T* total) {
  constexpr int W = Simd<T>::width;
  const int64_t columns = least(P, machine.n - j * P), c = machine.c;
  const T* coef = machine.coef + j * P * c;
  for (int64_t l = 0; l < lanes;) {
    const int64_t left = (lanes - l + W - 1) / W;
    if (left >= 3) weigh_columns<T, 3>(columns, c, coef, v + l, w + l, total + l);
    if (left == 2) weigh_columns<T, 2>(columns, c, coef, v + l, w + l, total + l);
    if (left == 1) weigh_columns<T, 1>(columns, c, coef, v + l, w + l, total + l);
    l += least(left, 3) * W;
  }
  multiply<T, Store::add>(machine.r, lanes, columns, machine.z + j * P * machine.r, 1, machine.r, w,
                          P, g, P);
}

template <class T>
void gradient(const AttackedMachine<T>& machine, int64_t m, const T* u, const T* u_panels,
              const T* cotangent, T* out, T* workspace, int threads) {
  const int64_t c = machine.c, r = machine.r;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < panels_of(m); ++i) {
    alignas(64) T w[P * P];
    T* v = workspace + thread_index() * P * (c + r + 1);
    T *g = v + c * P, *total = g + r * P;
    const int64_t rows = least(P, m - i * P);
    for (int64_t k = 0; k < c; ++k)
      for (int64_t l = 0; l < P; ++l)
        v[k * P + l] = l < rows ? cotangent[(i * P + l) * c + k] : T(0);
    for (int64_t e = 0; e < (r + 1) * P; ++e) g[e] = T(0);
    for (int64_t j = 0; j < panels_of(machine.n); ++j) {
      pair_tile<T>(static_cast<Kernel>(machine.kernel), r, u_panels + i * r * P,
                   machine.z_panels + j * r * P, least(P, machine.n - j * P), machine.exponent,
                   nullptr, w, rows);
      add_gradient(machine, j, rows, v, w, g, total);
    }
    for (int64_t l = 0; l < rows; ++l)
      for (int64_t t = 0; t < r; ++t)
        out[(i * P + l) * r + t] = g[t * P + l] - total[l] * u[(i * P + l) * r + t];
  }
}

// --- losses of one block: f, target, v are (c, P)

// Index of the largest of `values` over k, other than `without` (-1: none), for one lane.
template <class T>
int64_t largest(int64_t c, const T* values, int64_t lane, int64_t without) {
  int64_t best = without == 0 ? 1 : 0;
  for (int64_t k = best + 1; k < c; ++k)
    if (k != without && values[k * P + lane] > values[best * P + lane]) best = k;
  return best;
}

template <class T>
T margin_of(int64_t c, const T* f, int64_t lane, int64_t label) {
  if (c < 2) return -T(__builtin_inf());
  return f[largest(c, f, lane, label) * P + lane] - f[label * P + lane];
}

// The gradient v of the loss in f (up to a positive factor), and its value.
template <class T>
void loss_of(Loss loss, int64_t c, const T* f, const T* target, T* v, T* value) {
  constexpr int W = Simd<T>::width;
  if (loss == Loss::mse) {
    for (int64_t l = 0; l < P; ++l) value[l] = T(0);
    for (int64_t k = 0; k < c; ++k)
      for (int64_t l = 0; l < P; ++l) {
        const T residual = f[k * P + l] - target[k * P + l];
        v[k * P + l] = residual;
        value[l] += residual * residual;
      }
    return;
  }
  if (loss == Loss::cross_entropy) {
    for (int l = 0; l < P; l += W) {
      auto top = load(f + l);
      for (int64_t k = 1; k < c; ++k) top = at_least(load(f + k * P + l), top);
      typename Simd<T>::V sum{};
      for (int64_t k = 0; k < c; ++k) {
        const auto e = vexp<T>(load(f + k * P + l) - top);
        store(v + k * P + l, e);
        sum += e;
      }
      for (int64_t k = 0; k < c; ++k) store(v + k * P + l, load(v + k * P + l) / sum);
      store(value + l, top + vlog2<T>(sum) * T(0.6931471805599453));
    }
  } else {
    for (int64_t e = 0; e < c * P; ++e) v[e] = T(0);
  }
  for (int64_t l = 0; l < P; ++l) {
    const int64_t label = largest(c, target, l, -1);
    if (loss == Loss::margin) {
      value[l] = margin_of(c, f, l, label);
      if (c > 1) v[largest(c, f, l, label) * P + l] = T(1);
    } else {
      value[l] -= f[label * P + l];
    }
    v[label * P + l] -= T(1);
  }
}

// Row t of the points into the bounds.
template <class T>
void bound(const AttackSettings<T>& s, int64_t t, T* current) {
  if (s.lower)
    for (int64_t l = 0; l < P; ++l) current[l] = current[l] < s.lower[t] ? s.lower[t] : current[l];
  if (s.upper)
    for (int64_t l = 0; l < P; ++l) current[l] = current[l] > s.upper[t] ? s.upper[t] : current[l];
}

// One step from `current` along the sign of g, back into the box around x and the bounds.
template <class T>
void step_linf(const AttackSettings<T>& s, int64_t d, const T* x, const T* g, T* current) {
  for (int64_t t = 0; t < d; ++t) {
    const T eps = s.eps ? s.eps[t] : s.eps_all, step = s.step ? s.step[t] : s.step_all;
    for (int64_t l = 0; l < P; ++l) {
      const int64_t e = t * P + l;
      const T along = g[e] > 0 ? step : g[e] < 0 ? -step : T(0);
      const T move = current[e] + along - x[e];
      current[e] = x[e] + (move < -eps ? -eps : move > eps ? eps : move);
    }
    bound(s, t, current + t * P);
  }
}

// One step from `current` along eps g, back into the ellipsoid x + eps z, |z| <= 1, and the bounds.
// Each lane of eps g is divided by its largest size first: squares of tiny gradients, and the
// reciprocals of denormal ones, would leave the range of the type.
template <class T>
void step_l2(const AttackSettings<T>& s, int64_t d, const T* x, T* g, T* current) {
  alignas(64) T size[P], along[P], length[P];
  T widest = s.eps_all;
  for (int64_t t = 0; s.eps && t < d; ++t) widest = t == 0 || s.eps[t] > widest ? s.eps[t] : widest;
  for (int64_t l = 0; l < P; ++l) size[l] = along[l] = length[l] = T(0);
  for (int64_t t = 0; t < d; ++t) {
    const T share = s.eps && widest > 0 ? s.eps[t] / widest : T(1);
    for (int64_t l = 0; l < P; ++l) {
      g[t * P + l] *= share;
      const T a = g[t * P + l] < 0 ? -g[t * P + l] : g[t * P + l];
      size[l] = a > size[l] ? a : size[l];
    }
  }
  for (int64_t l = 0; l < P; ++l) size[l] = size[l] > 0 ? size[l] : T(1);
  for (int64_t t = 0; t < d; ++t)
    for (int64_t l = 0; l < P; ++l) {
      g[t * P + l] /= size[l];
      along[l] += g[t * P + l] * g[t * P + l];
    }
  for (int64_t l = 0; l < P; ++l)
    along[l] = along[l] > 0 ? T(1) / T(__builtin_sqrt(along[l])) : T(0);
  for (int64_t t = 0; t < d; ++t) {
    const T eps = s.eps ? s.eps[t] : s.eps_all, step = s.step ? s.step[t] : s.step_all;
    for (int64_t l = 0; l < P; ++l) {
      const int64_t e = t * P + l;
      current[e] = current[e] + step * along[l] * g[e] - x[e];
      const T z = eps > 0 ? current[e] / eps : T(0);
      length[l] += z * z;
    }
  }
  for (int64_t l = 0; l < P; ++l) {
    length[l] = T(__builtin_sqrt(length[l]));
    length[l] = length[l] > 1 ? T(1) / length[l] : T(1);
  }
  for (int64_t t = 0; t < d; ++t) {
    const bool frozen = (s.eps ? s.eps[t] : s.eps_all) <= 0;
    for (int64_t l = 0; l < P; ++l) {
      const int64_t e = t * P + l;
      current[e] = x[e] + (frozen ? T(0) : current[e] * length[l]);
    }
    bound(s, t, current + t * P);
  }
}

// Keeps points and outputs of those lanes where `reached` is better than any before, and of all at
// first: where nothing is better (NaN, or the margin of a single class), the start is the result.
template <class T>
void keep_best(Select select, bool first, int64_t d, int64_t c, const T* reached, const T* current,
               const T* f, T* value, T* best, T* best_f) {
  T better[P];
  bool any = first;
  for (int64_t l = 0; l < P; ++l) {
    better[l] = T(reached[l] > value[l] || select == Select::last);
    any = any || better[l] > 0;
  }
  if (!any) return;
  for (int64_t l = 0; l < P; ++l) value[l] = better[l] > 0 ? reached[l] : value[l];
  for (int64_t l = 0; l < P; ++l) better[l] = first ? T(1) : better[l];
  for (int64_t t = 0; t < d; ++t)
    for (int64_t l = 0; l < P; ++l)
      best[t * P + l] = better[l] > 0 ? current[t * P + l] : best[t * P + l];
  for (int64_t k = 0; k < c; ++k)
    for (int64_t l = 0; l < P; ++l)
      best_f[k * P + l] = better[l] > 0 ? f[k * P + l] : best_f[k * P + l];
}

template <class T>
void attack_block(const AttackedMachine<T>& machine, const AttackSettings<T>& settings,
                  int64_t rows, const T* x_rows, const T* targets, T* current_rows, T* value_rows,
                  T* output_rows, int64_t* zero_rows, T* p) {
  const int64_t n = machine.n, c = machine.c, d = machine.d, r = machine.r;
  T* weights = p;  // (48 panels, P)
  T *x = weights + panels_of(n) * P * P, *current = x + d * P, *best = current + d * P;
  T *centred = best + d * P, *g_x = centred + d * P, *u = g_x + d * P, *scaled = u + r * P;
  T *g = scaled + r * P, *f = g + r * P, *target = f + c * P, *v = target + c * P,
    *best_f = v + c * P;
  alignas(64) T tile[P * P], total[P], value[P], reached[P], moved[P];
  int64_t label[P], zero[P];
  const auto kernel = static_cast<Kernel>(machine.kernel);
  for (int64_t t = 0; t < d; ++t)
    for (int64_t l = 0; l < P; ++l) {
      x[t * P + l] = l < rows ? x_rows[l * d + t] : machine.mean[t];
      current[t * P + l] = best[t * P + l] = l < rows ? current_rows[l * d + t] : machine.mean[t];
    }
  for (int64_t k = 0; k < c; ++k)
    for (int64_t l = 0; l < P; ++l) target[k * P + l] = l < rows ? targets[l * c + k] : T(0);
  for (int64_t e = 0; e < r * P; ++e) g[e] = scaled[e] = T(0);  // lanes that no product writes
  for (int64_t e = 0; e < d * P; ++e) g_x[e] = T(0);
  for (int64_t l = 0; l < P; ++l) {
    value[l] = -T(__builtin_inf());
    zero[l] = 0;
    label[l] = largest(c, target, l, -1);
  }
  for (int64_t iteration = 0; iteration <= settings.iterations; ++iteration) {
    const bool last = iteration == settings.iterations;
    for (int64_t t = 0; t < d; ++t)
      for (int64_t l = 0; l < P; ++l) centred[t * P + l] = current[t * P + l] - machine.mean[t];
    project_lanes(d, r, rows, centred, machine.factor, u);
    for (int64_t e = 0; e < r * P; ++e) scaled[e] = u[e] * machine.scale;
    for (int64_t e = 0; e < c * P; ++e) f[e] = T(0);
    for (int64_t j = 0; j < panels_of(n); ++j) {
      const int64_t columns = least(P, n - j * P);
      pair_tile<T>(kernel, r, scaled, machine.z_panels + j * r * P, columns, machine.exponent, tile,
                   last ? nullptr : weights + j * P * P, rows);
      multiply<T, Store::add>(c, rows, columns, machine.coef + j * P * c, 1, c, tile, P, f, P);
    }
    loss_of(settings.loss, c, f, target, v, reached);
    for (int64_t l = 0; settings.select == Select::margin && l < P; ++l)
      reached[l] = margin_of(c, f, l, label[l]);
    if (last || settings.select != Select::last)
      keep_best(settings.select, iteration == 0, d, c, reached, current, f, value, best, best_f);
    if (last) break;
    for (int64_t e = 0; e < r * P; ++e) g[e] = T(0);
    for (int64_t l = 0; l < P; ++l) total[l] = moved[l] = T(0);
    for (int64_t j = 0; j < panels_of(n); ++j)
      add_gradient(machine, j, rows, v, weights + j * P * P, g, total);
    for (int64_t t = 0; t < r; ++t)
      for (int64_t l = 0; l < P; ++l) g[t * P + l] -= total[l] * u[t * P + l];
    multiply<T, Store::set>(d, rows, r, machine.factor, r, 1, g, P, g_x, P);
    for (int64_t t = 0; t < d; ++t)
      for (int64_t l = 0; l < P; ++l) moved[l] = g_x[t * P + l] != 0 ? T(1) : moved[l];
    for (int64_t l = 0; l < P; ++l) zero[l] += moved[l] == 0;
    if (settings.l2)
      step_l2(settings, d, x, g_x, current);
    else
      step_linf(settings, d, x, g_x, current);
  }
  for (int64_t l = 0; l < rows; ++l) {
    for (int64_t t = 0; t < d; ++t) current_rows[l * d + t] = best[t * P + l];
    for (int64_t k = 0; k < c; ++k) output_rows[l * c + k] = best_f[k * P + l];
    value_rows[l] = value[l];
    zero_rows[l] = zero[l];
  }
}

template <class T>
void attack(const AttackedMachine<T>& machine, const AttackSettings<T>& settings, int64_t m,
            const T* x, const T* targets, T* current, T* value, T* outputs, int64_t* zero_gradients,
            T* workspace, int threads) {
  constexpr int W = Simd<T>::width;
  const int64_t size = attack_workspace(machine.n, machine.c, machine.d, machine.r);
  const int64_t d = machine.d, blocks = panels_of(m), vectors = (m + W - 1) / W;
  // Whole vectors, spread evenly: a short last block would leave its register tiles half empty.
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t from = vectors * i / blocks * W, to = least(m, vectors * (i + 1) / blocks * W);
    attack_block(machine, settings, to - from, x + from * d, targets + from * machine.c,
                 current + from * d, value + from, outputs + from * machine.c,
                 zero_gradients + from, workspace + thread_index() * size);
  }
}

}  // namespace

extern const AttackTable NORMALIGN_VARIANT(rfam_attack) = {
    {project<float>, gradient<float>, attack<float>},
    {project<double>, gradient<double>, attack<double>}};

}  // namespace normalign
