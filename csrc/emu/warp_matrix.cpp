// What the lanes of a warp do together for warp_matrix.h. Products are exact. They are added to a
// float32 sum one after another and cut towards zero each time, which is what GPUs have been seen
// to do, and never better than they do.
#include <cmath>

#include "machine_state.h"

namespace normalign {
namespace emu {
namespace {

// The double a + b is exact here, or off by far less than what is cut.
float add_and_cut(float a, double b) {
  const double sum = a + b;
  float cut = static_cast<float>(sum);
  if (std::isfinite(cut) && std::fabs(static_cast<double>(cut)) > std::fabs(sum))
    cut = std::nextafter(cut, 0.0f);
  return cut;
}

void check_rounded(float value, uint32_t rounded_away, Where where) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value == value && bits & rounded_away)
    fail("a factor at " + text(where) + " has more digits than its type: it was not rounded");
}

void multiply(const uint64_t* lanes, Where where) {
  const MatrixProduct* part[32];
  for (int l = 0; l < 32; ++l) part[l] = reinterpret_cast<const MatrixProduct*>(lanes[l]);
  const int m = part[0]->m, n = part[0]->n, k = part[0]->k;
  float result[16 * 16];
  for (int e = 0; e < m * k; ++e)
    check_rounded(part[e % 32]->a[e / 32], part[0]->rounded_away, where);
  for (int e = 0; e < k * n; ++e)
    check_rounded(part[e % 32]->b[e / 32], part[0]->rounded_away, where);
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      const int at = i * n + j;
      float sum = part[at % 32]->c[at / 32];
      for (int q = 0; q < k; ++q) {
        const int left = i * k + q, right = q * n + j;
        sum = add_and_cut(sum, static_cast<double>(part[left % 32]->a[left / 32]) *
                                   part[right % 32]->b[right / 32]);
      }
      result[at] = sum;
    }
  }
  for (int e = 0; e < m * n; ++e) part[e % 32]->d[e / 32] = result[e];
}

constexpr uint32_t all_lanes = 0xffffffffu;

}  // namespace

void warp_matrix_place(const void* p, unsigned ldm, size_t element, Where where) {
  const auto address = reinterpret_cast<uint64_t>(p);
  if (address % 32) fail("the matrix at " + text(where) + " does not start at 32 bytes");
  if (ldm * element % 16) fail("rows of the matrix at " + text(where) + " are not 16 bytes apart");
  // Addresses have 48 bits, and strides in shared memory 16.
  warp_collective(Collective::agree, all_lanes, address ^ static_cast<uint64_t>(ldm) << 48, 0,
                  where);
}

void warp_matrix_product(const MatrixProduct& own, Where where) {
  warp_collective(Collective::serve, all_lanes, reinterpret_cast<uint64_t>(&own), 0, where,
                  multiply);
}

}  // namespace emu
}  // namespace normalign
