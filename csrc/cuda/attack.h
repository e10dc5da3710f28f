// Projected gradient ascent on kernel machines, on a GPU: all steps of an attack in one launch, for
// many points, radii and machines at once.
//
// Machines of different sizes share a batch when they are padded with zeros: a point whose
// coefficients are 0, or a column of the factor that is 0, changes no result. Arrays are
// contiguous; P machines, E radii, m points of width d for each, n training points of width r, c
// outputs.
#pragma once
#include "../rfam_attack.h"
#include "laplace.h"

namespace normalign {

// Passed to the kernel by value.
template <class T>
struct GpuAttack {
  GpuKernel<T> kernel;
  Loss loss;
  Select select;
  int l2;
  int machines, radii, iterations;
  int n, c, d, r;
  int64_t m;
  const T* z;            // (P, r, n): training points, transposed
  const T* coef;         // (P, c, n): coefficients, transposed
  const double* mean;    // (P, d)
  const double* factor;  // (P, d, r)
  const T* back;         // (P, r, d): the factor, transposed and rounded
  const T* x;            // (P, m, d)
  const T* targets;      // (P, m, c)
  // (E, d). The region is x + eps z with |z| <= 1 in the norm, a step is step * direction; a
  // feature whose radius is 0 is frozen.
  const T *eps, *step;
  const T *lower, *upper;  // (d) or null
  T* points;               // (P, E, m, d): first iterates; on return what `select` chooses
  T* value;                // (P, E, m): its loss, or margin
  T* outputs;              // (P, E, m, c): its outputs
  int64_t* zero;           // (P, E, m): steps whose gradient was 0
};

// Whether a block's rows fit into the shared memory of the current device.
bool attack_fits(int n, int c, int d, int r, int64_t element);

template <class T>
Status attack_gpu(const GpuAttack<T>& attack, Stream stream);

}  // namespace normalign
