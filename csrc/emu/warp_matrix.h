// Products of small matrices by a warp, nvcuda::wmma, as far as the kernels use it: float32 sums of
// tf32 (16 x 16 x 8) and bf16 (16 x 16 x 16) products. A fragment's elements are spread over the
// lanes in an order of this file's own and cannot be touched one by one, because a GPU's order is
// not documented either. All 32 lanes must call with the same arguments. Each lane reads and writes
// its own elements, before and after the lanes meet: a missing barrier shows as it would elsewhere.
#pragma once
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "machine.h"

struct __nv_bfloat16 {
  uint16_t bits;
};

// To the nearest, ties to even; NaN is one NaN.
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  if (value != value) return {0x7fff};
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline float __bfloat162float(__nv_bfloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}

namespace nvcuda {
namespace wmma {

struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;
enum layout_t { mem_row_major, mem_col_major };
namespace precision {
struct tf32;
}

// To the nearest of 10 bits after the point, ties away from zero; NaN is one NaN.
inline float __float_to_tf32(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  bits = value != value ? 0x7fffffffu : (bits + 0x1000u) & ~0x1fffu;
  memcpy(&value, &bits, sizeof value);
  return value;
}

template <class Use, int m, int n, int k, class T, class Layout = void>
class fragment;

template <class T>
struct operand;  // how it stands in memory, and the bits that rounding leaves 0
template <>
struct operand<precision::tf32> {
  using stored = float;
  static constexpr uint32_t rounded_away = 0x1fffu;
  static float value(float x) { return x; }
};
template <>
struct operand<__nv_bfloat16> {
  using stored = __nv_bfloat16;
  static constexpr uint32_t rounded_away = 0;
  static float value(__nv_bfloat16 x) { return __bfloat162float(x); }
};

// One lane's part of a matrix: elements lane, lane + 32, ... of its rows one after another.
template <int rows, int cols>
class Part {
 public:
  static constexpr int count = rows * cols / 32;
  float held[count];  // no such name on a GPU: kernels cannot use it
  Part() {
    for (float& value : held) value = std::numeric_limits<float>::quiet_NaN();
  }
  static int row(int i) { return (::normalign::emu::lane() + 32 * i) / cols; }
  static int col(int i) { return (::normalign::emu::lane() + 32 * i) % cols; }
};

template <int m, int n, int k, class T, class Layout>
class fragment<matrix_a, m, n, k, T, Layout> : public Part<m, k> {
 public:
  static constexpr bool by_rows = std::is_same<Layout, row_major>::value;
};
template <int m, int n, int k, class T, class Layout>
class fragment<matrix_b, m, n, k, T, Layout> : public Part<k, n> {
 public:
  static constexpr bool by_rows = std::is_same<Layout, row_major>::value;
};
template <int m, int n, int k>
class fragment<accumulator, m, n, k, float> : public Part<m, n> {};

template <int m, int n, int k>
void fill_fragment(fragment<accumulator, m, n, k, float>& f, float value) {
  for (float& element : f.held) element = value;
}

template <class Use, int m, int n, int k, class T, class Layout>
void load_matrix_sync(fragment<Use, m, n, k, T, Layout>& f, const typename operand<T>::stored* p,
                      unsigned ldm, int line = __builtin_LINE(),
                      const char* file = __builtin_FILE()) {
  for (int i = 0; i < f.count; ++i) {
    const unsigned row = static_cast<unsigned>(f.row(i)), col = static_cast<unsigned>(f.col(i));
    f.held[i] = operand<T>::value(p[f.by_rows ? row * ldm + col : col * ldm + row]);
  }
  ::normalign::emu::warp_matrix_place(p, ldm, sizeof *p, {file, line});
}

template <int m, int n, int k>
void store_matrix_sync(float* p, const fragment<accumulator, m, n, k, float>& f, unsigned ldm,
                       layout_t layout, int line = __builtin_LINE(),
                       const char* file = __builtin_FILE()) {
  ::normalign::emu::warp_matrix_place(p, ldm, sizeof *p, {file, line});
  for (int i = 0; i < f.count; ++i) {
    const unsigned row = static_cast<unsigned>(f.row(i)), col = static_cast<unsigned>(f.col(i));
    p[layout == mem_row_major ? row * ldm + col : col * ldm + row] = f.held[i];
  }
}

template <int m, int n, int k, class T, class LA, class LB>
void mma_sync(fragment<accumulator, m, n, k, float>& d, const fragment<matrix_a, m, n, k, T, LA>& a,
              const fragment<matrix_b, m, n, k, T, LB>& b,
              const fragment<accumulator, m, n, k, float>& c, int line = __builtin_LINE(),
              const char* file = __builtin_FILE()) {
  const ::normalign::emu::MatrixProduct own{m,      n,      k,      operand<T>::rounded_away,
                                            a.held, b.held, c.held, d.held};
  ::normalign::emu::warp_matrix_product(own, {file, line});
}

}  // namespace wmma
}  // namespace nvcuda
