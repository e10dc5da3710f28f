// Features, input gradients and projected gradient ascent of f = K(., z) coef, 48 points at a time.
// Shapes: x (m, d), mean (d), factor (d, r), z (n, r) row-major and z_panels (laplace_gram.h),
// coef (n, c) with row stride c. Gradients lack the constant factor of the weights W.
#pragma once
#include "common.h"

namespace normalign {

enum class Loss { mse = 0, margin = 1, cross_entropy = 2 };
enum class Select { last = 0, loss = 1, margin = 2 };

// The machine and its sizes.
template <class T>
struct AttackedMachine {
  int kernel;
  T exponent, scale;  // scale of coordinates, as for laplace_gram.h
  int64_t n, c, d, r;
  const T *mean, *factor, *z, *z_panels, *coef;
};

template <class T>
struct AttackSettings {
  Loss loss;
  Select select;
  bool l2;
  int64_t iterations;
  const T *eps, *step;  // (d), or null: eps_all, step_all for each feature
  T eps_all, step_all;
  const T *lower, *upper;  // (d) or null
};

template <class T>
struct AttackOf {
  // u (m, r) = (x - mean) factor. A row's result depends on nothing but the row: equal points stay
  // equal. workspace: threads * 48 * (d + r)
  void (*project)(int64_t m, int64_t d, int64_t r, const T* x, int64_t ldx, const T* mean,
                  const T* factor, T* u, T* workspace, int threads);
  // g (m, r): gradient in factor space of sum_k cotangent_ik f_k at u (m, r), u_panels.
  // workspace: threads * 48 * (c + r + 1)
  void (*gradient)(const AttackedMachine<T>& machine, int64_t m, const T* u, const T* u_panels,
                   const T* cotangent, T* g, T* workspace, int threads);
  // current (m, d): first iterates; on return what `select` chooses, with its value (m), the
  // outputs there (m, c), and the number of steps with zero gradient (m). workspace: threads *
  // attack_workspace(...)
  void (*attack)(const AttackedMachine<T>& machine, const AttackSettings<T>& settings, int64_t m,
                 const T* x, const T* targets, T* current, T* value, T* outputs,
                 int64_t* zero_gradients, T* workspace, int threads);
};

static inline int64_t attack_workspace(int64_t n, int64_t c, int64_t d, int64_t r) {
  return 48 * ((n + 47) / 48 * 48 + 5 * d + 3 * r + 4 * c);
}

struct AttackTable {
  AttackOf<float> f32;
  AttackOf<double> f64;
};

NORMALIGN_DECLARE_TABLES(AttackTable, rfam_attack);

}  // namespace normalign
