// One iteration of RFAM in few calls: the kernel system of projected points and its solution, the
// predictions of a machine, and the next factor of M from the AGOP.
#pragma once
#include "common.h"

namespace normalign {

enum class Solved {
  done = 0,
  wide = 1,    // float32 can't hold the coordinates, or the coefficients; there is no factor
  failed = 2,  // not positive definite
  hard = 3     // float32 can't hold the coefficients; there is a factor
};

// Limits of float32; estimates of the relative error of the coefficients.
struct Float32Rules {
  double wide;   // largest scaled coordinate
  double stand;  // errors below it are let stand
  double hard;   // errors from here on, with a pivot below `near`, ask for float64 throughout
  double near;
};

// K(x, x) + diag(reg / weight), and right sides. x (n, d) with row stride ldx, mean (d), factor
// (d, r), y (n, c), weight (n) or null.
template <class T>
struct KernelSystem {
  int kernel;
  double exponent, scale;  // as for laplace_gram.h
  int64_t n, d, r, c;
  const T* x;
  int64_t ldx;
  const T* mean;
  const double* factor;
  const T *y, *weight;
  double reg;
};

template <class T>
struct RfamFitOf {
  // u (n, r), its panels and coef (n, c). In float32 with `refine`, an error above rules.stand is
  // taken out by residuals in float64, or where points are few, by a factor in float64. The
  // workspace, of rfam_solve_workspace bytes, starts with the factor and the reciprocals of its
  // diagonal (csrc/cholesky.h). pivots: least and greatest; largest: absolute value in coef.
  Solved (*solve)(const KernelSystem<T>& system, const Float32Rules& rules, bool refine, T* u,
                  T* panels, T* coef, T* pivots, T* largest, void* workspace, int threads);
  // out (m, c) = K(x, z) coef with z_panels (n, r). workspace: rfam_predict_workspace bytes.
  void (*predict)(const KernelSystem<T>& machine, int64_t m, const T* x, int64_t ldx,
                  const T* z_panels, const T* coef, T* out, void* workspace, int threads);
};

struct RfamFitTable {
  RfamFitOf<float> f32;
  RfamFitOf<double> f64;
  // next (d, r) = factor chol(agop), scaled such that the squares of its entries sum to d;
  // change[0] = |M' - M| / |M'|. False where agop (r, r) is not positive definite to `tolerance`
  // times its largest diagonal element. workspace: 2 r^2.
  bool (*next_factor)(int64_t d, int64_t r, const double* factor, const double* agop,
                      double tolerance, double* next, double* change, double* workspace);
};

static inline int64_t rfam_aligned(int64_t bytes) {
  return (bytes + 63) / 64 * 64;
}

// Up to so many points a factor in float64 costs less than one in float32 and a correction.
constexpr int64_t few_points = 256;

static inline int64_t rfam_factor_bytes(int64_t n, int64_t itemsize) {
  const int64_t rows = (n + 47) / 48 * 48;
  return rfam_aligned(itemsize * (rows * (rows + 48) / 2 + rows));
}

static inline int64_t rfam_solve_workspace(int64_t n, int64_t d, int64_t r, int64_t c, int threads,
                                           int64_t itemsize) {
  const int64_t rows = (n + 47) / 48 * 48, stride = (c + 15) / 16 * 16, P = 48;
  const int64_t own = rfam_factor_bytes(n, itemsize) + rfam_aligned(itemsize * (d * r + d)) +
                      rfam_aligned(itemsize * threads * P * (d + r)) +
                      rfam_aligned(itemsize * rows) + rfam_aligned(itemsize * rows * stride);
  if (itemsize == 8) return own;
  const int64_t wide = rfam_aligned(8 * rows * r) + rfam_aligned(8 * rows * stride);
  if (n <= few_points) return own + wide + rfam_factor_bytes(n, 8) + rfam_aligned(8 * rows);
  return own + wide + rfam_aligned(8 * rows * stride) +
         rfam_aligned(8 * threads * (rows * stride + P * c));
}

static inline int64_t rfam_predict_workspace(int64_t m, int64_t d, int64_t r, int64_t c,
                                             int threads, int64_t itemsize) {
  const int64_t rows = (m + 47) / 48 * 48, P = 48;
  return rfam_aligned(itemsize * d * r) + rfam_aligned(itemsize * threads * P * (d + r)) +
         2 * rfam_aligned(itemsize * rows * r) + rfam_aligned(itemsize * threads * P * c);
}

NORMALIGN_DECLARE_TABLES(RfamFitTable, rfam_fit);

}  // namespace normalign
