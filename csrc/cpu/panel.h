// Panel layout and the register-tiled products on it.
//
// A matrix of R rows and n columns is stored as ceil(n / PW) panels, each R x PW and contiguous,
// where PW is two vectors: element (i, j) is at ((j / PW) * R + i) * PW + j % PW. The last panel is
// padded with columns that hold anything. Every product of a stack reads and writes panels, so
// nothing is repacked between layers:
//   nn_tile   C = epilogue(A B): A and C in panels, B one packed panel of K x PW
//   tn_tile   C (+)= A^T B: A and B in panels, contracted over rows, C row-major
#pragma once
#include "simd.h"

namespace normalign {
namespace {

#if NORMALIGN_VECTOR_BYTES == 64
constexpr int kTileRows = 14;  // 28 accumulators, 2 of B and 1 broadcast: 31 of 32 registers
#elif NORMALIGN_VECTOR_BYTES == 32
constexpr int kTileRows = 6;  // 12 + 2 + 1 of 16
#else
constexpr int kTileRows = 4;
#endif

template <class T>
constexpr int panel_width() {
  return 2 * Simd<T>::width;
}

template <class T>
NORMALIGN_INLINE int64_t panels(int64_t cols) {
  return (cols + panel_width<T>() - 1) / panel_width<T>();
}

// What happens to a tile of A B before it is stored. Pointers are to the panel that holds the
// tile, at the product's first row; all have rows of PW elements.
enum class Finish {
  store,     // c = acc
  relu,      // c = relu(acc)
  mask,      // c = acc where gate > 0
  multiply,  // c = acc * d1
  probe,     // kept = acc, c = acc * d1
  tangent,   // curve (+)= d2 * acc * kept, c = acc * d1
  adjoint    // c = acc * d1 + c
};

template <class T>
struct Epilogue {
  Finish finish = Finish::store;
  T* c = nullptr;
  const T* bias = nullptr;  // PW elements, added to acc first
  const T* gate = nullptr;  // activations: a > 0 where the derivative is 1
  const T* d1 = nullptr;    // first derivative of the activation
  const T* d2 = nullptr;    // second derivative; null: the constant below
  T d2_constant = T(0);
  T* kept = nullptr;
  T* curve = nullptr;
  bool curve_adds = false;
  const T* row_scale = nullptr;  // one factor a row, for acc
};

template <class T, int MR, int NV>
NORMALIGN_INLINE void finish_tile(typename Simd<T>::V (&acc)[MR][NV], const Epilogue<T>& e,
                                  int64_t row) {
  using V = typename Simd<T>::V;
  constexpr int W = Simd<T>::width, PW = panel_width<T>();
  T* c = e.c + row * PW;
  if (e.row_scale) {
    NORMALIGN_UNROLL
    for (int i = 0; i < MR; ++i) {
      NORMALIGN_UNROLL
      for (int j = 0; j < NV; ++j) acc[i][j] *= e.row_scale[row + i];
    }
  }
  if (e.bias) {
    NORMALIGN_UNROLL
    for (int j = 0; j < NV; ++j) {
      const V b = load(e.bias + j * W);
      NORMALIGN_UNROLL
      for (int i = 0; i < MR; ++i) acc[i][j] += b;
    }
  }
  switch (e.finish) {
    case Finish::store:
      NORMALIGN_UNROLL
      for (int i = 0; i < MR; ++i) {
        NORMALIGN_UNROLL
        for (int j = 0; j < NV; ++j) store(c + i * PW + j * W, acc[i][j]);
      }
      break;
    case Finish::relu:
      NORMALIGN_UNROLL
      for (int i = 0; i < MR; ++i) {
        NORMALIGN_UNROLL
        for (int j = 0; j < NV; ++j) {
          // "z <= 0 ? 0 : z" and not "z > 0 ? z : 0": NaN stays NaN.
          store(c + i * PW + j * W, acc[i][j] <= V{} ? V{} : acc[i][j]);
        }
      }
      break;
    case Finish::mask: {
      const T* gate = e.gate + row * PW;
      NORMALIGN_UNROLL
      for (int i = 0; i < MR; ++i) {
        NORMALIGN_UNROLL
        for (int j = 0; j < NV; ++j) {
          const V a = load(gate + i * PW + j * W);
          store(c + i * PW + j * W, a <= V{} ? V{} : acc[i][j]);
        }
      }
      break;
    }
    default: {
      const T* d1 = e.d1 + row * PW;
      for (int i = 0; i < MR; ++i) {
        NORMALIGN_UNROLL
        for (int j = 0; j < NV; ++j) {
          const int64_t at = i * PW + j * W;
          const V z = acc[i][j], slope = load(d1 + at);
          if (e.finish == Finish::adjoint) {
            store(c + at, z * slope + load(c + at));
            continue;
          }
          if (e.finish == Finish::probe) store(e.kept + row * PW + at, z);
          if (e.finish == Finish::tangent) {
            const V bend = e.d2 ? load(e.d2 + row * PW + at) : splat<T>(e.d2_constant);
            T* curve = e.curve + row * PW + at;
            const V term = bend * z * load(e.kept + row * PW + at);
            store(curve, e.curve_adds ? load(curve) + term : term);
          }
          store(c + at, z * slope);
        }
      }
    }
  }
}

// a: first row of the tile in panel 0; panels are a_panel elements apart. b: K x PW. `partial`
// holds the sum over earlier columns (null: none); `last` says whether the epilogue follows, or
// the sum goes back to `partial`.
template <class T, int MR, int NV>
__attribute__((noinline)) void nn_tile(int64_t K, const T* a, int64_t a_panel, const T* b,
                                       T* partial, bool first, bool last, const Epilogue<T>& e,
                                       int64_t row) {
  using V = typename Simd<T>::V;
  constexpr int W = Simd<T>::width, PW = panel_width<T>();
  V acc[MR][NV];
  NORMALIGN_UNROLL
  for (int i = 0; i < MR; ++i) {
    NORMALIGN_UNROLL
    for (int j = 0; j < NV; ++j) acc[i][j] = V{};
  }
  for (int64_t k = 0; k < K; k += PW, a += a_panel) {
    const int64_t count = K - k < PW ? K - k : PW;
    const T* ak = a;
#pragma GCC unroll 2
    for (int64_t q = 0; q < count; ++q, ++ak, b += PW) {
      V bv[NV];
      NORMALIGN_UNROLL
      for (int j = 0; j < NV; ++j) bv[j] = load(b + j * W);
      NORMALIGN_UNROLL
      for (int i = 0; i < MR; ++i) {
        const V x = splat<T>(ak[i * PW]);
        NORMALIGN_UNROLL
        for (int j = 0; j < NV; ++j) acc[i][j] += x * bv[j];
      }
    }
  }
  if (!first) {  // added at the end: a sum over many pieces then errs like one over few terms
    NORMALIGN_UNROLL
    for (int i = 0; i < MR; ++i) {
      NORMALIGN_UNROLL
      for (int j = 0; j < NV; ++j) acc[i][j] += load(partial + (row + i) * PW + j * W);
    }
  }
  if (last) {
    finish_tile<T, MR, NV>(acc, e, row);
    return;
  }
  NORMALIGN_UNROLL
  for (int i = 0; i < MR; ++i) {
    NORMALIGN_UNROLL
    for (int j = 0; j < NV; ++j) store(partial + (row + i) * PW + j * W, acc[i][j]);
  }
}

// C[i, j] (+)= sum_k a[k, i] b[k, j]; C row-major with row stride ldc, `cols` columns to write.
template <class T, int MR, int NV>
__attribute__((noinline)) void tn_tile(int64_t K, const T* a, const T* b, T* c, int64_t ldc,
                                       int64_t cols, bool accumulate) {
  using V = typename Simd<T>::V;
  constexpr int W = Simd<T>::width, PW = panel_width<T>();
  V acc[MR][NV];
  NORMALIGN_UNROLL
  for (int i = 0; i < MR; ++i) {
    NORMALIGN_UNROLL
    for (int j = 0; j < NV; ++j) acc[i][j] = V{};
  }
#pragma GCC unroll 2
  for (int64_t k = 0; k < K; ++k, a += PW, b += PW) {
    V bv[NV];
    NORMALIGN_UNROLL
    for (int j = 0; j < NV; ++j) bv[j] = load(b + j * W);
    NORMALIGN_UNROLL
    for (int i = 0; i < MR; ++i) {
      const V x = splat<T>(a[i]);
      NORMALIGN_UNROLL
      for (int j = 0; j < NV; ++j) acc[i][j] += x * bv[j];
    }
  }
  NORMALIGN_UNROLL
  for (int i = 0; i < MR; ++i) {
    NORMALIGN_UNROLL
    for (int j = 0; j < NV; ++j) {
      T* out = c + i * ldc + j * W;
      const int64_t n = cols - j * W;
      store_n(out, accumulate ? acc[i][j] + load_n(out, n) : acc[i][j], n);
    }
  }
}

template <class T>
using NnTile = void (*)(int64_t, const T*, int64_t, const T*, T*, bool, bool, const Epilogue<T>&,
                        int64_t);
template <class T>
using TnTile = void (*)(int64_t, const T*, const T*, T*, int64_t, int64_t, bool);

// Tile functions by height; index 0 is unused.
template <class T, int NV>
struct Tiles {
#define NORMALIGN_TILES(F) nullptr, F<T, 1, NV>, F<T, 2, NV>, F<T, 3, NV>, F<T, 4, NV>
#define NORMALIGN_TILES_6(F) F<T, 5, NV>, F<T, 6, NV>
#define NORMALIGN_TILES_14(F)                                                                    \
  F<T, 7, NV>, F<T, 8, NV>, F<T, 9, NV>, F<T, 10, NV>, F<T, 11, NV>, F<T, 12, NV>, F<T, 13, NV>, \
      F<T, 14, NV>
  static NnTile<T> nn(int rows) {
    static constexpr NnTile<T> table[kTileRows + 1] = {
        NORMALIGN_TILES(nn_tile),
#if NORMALIGN_VECTOR_BYTES >= 32
        NORMALIGN_TILES_6(nn_tile),
#endif
#if NORMALIGN_VECTOR_BYTES >= 64
        NORMALIGN_TILES_14(nn_tile),
#endif
    };
    return table[rows];
  }
  static TnTile<T> tn(int rows) {
    static constexpr TnTile<T> table[kTileRows + 1] = {
        NORMALIGN_TILES(tn_tile),
#if NORMALIGN_VECTOR_BYTES >= 32
        NORMALIGN_TILES_6(tn_tile),
#endif
#if NORMALIGN_VECTOR_BYTES >= 64
        NORMALIGN_TILES_14(tn_tile),
#endif
    };
    return table[rows];
  }
#undef NORMALIGN_TILES
#undef NORMALIGN_TILES_6
#undef NORMALIGN_TILES_14
};

// Cuts `rows` into tiles of nearly equal height.
struct Split {
  int64_t count, height, taller;
  explicit Split(int64_t rows)
      : count((rows + kTileRows - 1) / kTileRows),
        height(count ? rows / count : 0),
        taller(count ? rows % count : 0) {}
  int rows_of(int64_t tile) const { return static_cast<int>(height + (tile < taller ? 1 : 0)); }
};

// One panel of C = epilogue(A B) over `rows` rows. `cols`: columns of the panel in use.
template <class T>
void nn_panel(int64_t rows, int64_t cols, int64_t K, const T* a, int64_t a_panel, const T* b,
              T* partial, bool first, bool last, const Epilogue<T>& e) {
  const Split split(rows);
  const bool narrow = cols <= Simd<T>::width;
  int64_t row = 0;
  for (int64_t t = 0; t < split.count; ++t) {
    const int mr = split.rows_of(t);
    const NnTile<T> tile = narrow ? Tiles<T, 1>::nn(mr) : Tiles<T, 2>::nn(mr);
    tile(K, a + row * panel_width<T>(), a_panel, b, partial, first, last, e, row);
    row += mr;
  }
}

// One block of C (+)= A^T B: the columns of one A panel (`m` in use) by those of one B panel.
template <class T>
void tn_panel(int64_t m, int64_t cols, int64_t K, const T* a, const T* b, T* c, int64_t ldc,
              bool accumulate) {
  const Split split(m);
  const bool narrow = cols <= Simd<T>::width;
  int64_t i = 0;
  for (int64_t t = 0; t < split.count; ++t) {
    const int mr = split.rows_of(t);
    const TnTile<T> tile = narrow ? Tiles<T, 1>::tn(mr) : Tiles<T, 2>::tn(mr);
    tile(K, a + i, b, c + i * ldc, ldc, cols, accumulate);
    i += mr;
  }
}

// Rows of a row-major matrix, columns [j, j + PW) as one panel; padding becomes 0.
template <class T>
void pack_panel(int64_t rows, int64_t cols, const T* src, int64_t ld, T* panel) {
  constexpr int W = Simd<T>::width, PW = panel_width<T>();
  for (int64_t i = 0; i < rows; ++i, src += ld, panel += PW) {
    store(panel, load_n(src, cols));
    store(panel + W, load_n(src + W, cols - W));
  }
}

// W x W transpose: out[k][j] = src[j][k] for j < rows, k < cols; lanes past `rows` become 0.
template <class T>
NORMALIGN_INLINE void transpose_tile(const T* src, int64_t ld, int64_t rows, int64_t cols, T* out,
                                     int64_t out_ld) {
  constexpr int W = Simd<T>::width;
#if defined(__AVX512F__)
  using V = typename Simd<T>::V;
  using I = typename Simd<T>::I;
  I low, high;  // interleave the first, the second halves of two vectors
  NORMALIGN_UNROLL
  for (int i = 0; i < W / 2; ++i) {
    low[2 * i] = i;
    low[2 * i + 1] = W + i;
    high[2 * i] = W / 2 + i;
    high[2 * i + 1] = W + W / 2 + i;
  }
  V v[W], t[W];
  NORMALIGN_UNROLL
  for (int i = 0; i < W; ++i) v[i] = i < rows ? load_n(src + i * ld, cols) : V{};
  NORMALIGN_UNROLL
  for (int round = 1; round < W; round *= 2) {
    NORMALIGN_UNROLL
    for (int i = 0; i < W / 2; ++i) {
      t[2 * i] = __builtin_shuffle(v[i], v[i + W / 2], low);
      t[2 * i + 1] = __builtin_shuffle(v[i], v[i + W / 2], high);
    }
    NORMALIGN_UNROLL
    for (int i = 0; i < W; ++i) v[i] = t[i];
  }
  NORMALIGN_UNROLL
  for (int k = 0; k < W; ++k)
    if (k < cols) store(out + k * out_ld, v[k]);
#else
  const int64_t n = cols < W ? cols : W;
  for (int64_t k = 0; k < n; ++k)
    for (int64_t j = 0; j < W; ++j) out[k * out_ld + j] = j < rows ? src[j * ld + k] : T(0);
#endif
}

// The transpose of `rows` (at most PW) rows of a row-major matrix, columns [0, K), as one panel of
// K x PW.
template <class T>
void pack_panel_transposed(int64_t rows, int64_t K, const T* src, int64_t ld, T* panel) {
  constexpr int W = Simd<T>::width, PW = panel_width<T>();
  for (int h = 0; h < 2; ++h) {
    const int64_t some = rows - h * W;
    const T* from = src + (some > 0 ? h * W * ld : 0);  // no address past the end is formed
    for (int64_t k = 0; k < K; k += W)
      transpose_tile(from + k, ld, some, K - k, panel + k * PW + h * W, PW);
  }
}

}  // namespace
}  // namespace normalign
