#include "cholesky.h"

#include "point_panel.h"

namespace normalign {
namespace {

constexpr int group = 8;        // panels whose columns are finished together
constexpr int64_t depth = 192;  // of one product: 192 x 48 floats stay in the first-level cache

NORMALIGN_INLINE int64_t panel_start(int64_t i) {
  return P * P * (i * (i + 1) / 2);
}

// Rows of panel i that are points. What fills the last panel is the identity, factored already.
NORMALIGN_INLINE int64_t rows_of(int64_t n, int64_t i) {
  return least(P, n - i * P);
}

// The triangle of M columns that a block of columns is solved with: factor[i][l] = L[i, l].
template <class T>
struct Block {
  static constexpr int M = Tiling<T>::M;
  T factor[M][M], inverse[M];
};

// c <- c L^-T for M columns of `rows` rows.
template <class T>
__attribute__((noinline)) void solve_block(const Block<T>& block, int64_t rows, T* c) {
  using V = typename Simd<T>::V;
  constexpr int M = Block<T>::M, W = Simd<T>::width;
  for (int64_t v = 0; v < rows; v += W) {
    V x[M];
    NORMALIGN_UNROLL
    for (int l = 0; l < M; ++l) x[l] = load(c + l * P + v);
    NORMALIGN_UNROLL
    for (int l = 0; l < M; ++l) {
      x[l] = x[l] * block.inverse[l];
      NORMALIGN_UNROLL
      for (int i = l + 1; i < M; ++i) x[i] -= x[l] * block.factor[i][l];
    }
    NORMALIGN_UNROLL
    for (int l = 0; l < M; ++l) store(c + l * P + v, x[l]);
  }
}

// Factors the M x M block on the diagonal; rows and columns start at `at` of the panel's tile. The
// first `count` pivots are of points, the others of what fills the panel.
template <class T>
int factor_block(const T* c, int at, int64_t count, Block<T>* block, T* pivots) {
  constexpr int M = Block<T>::M;
  for (int l = 0; l < M; ++l) {
    T pivot = c[l * P + at + l];
    for (int k = 0; k < l; ++k) pivot -= block->factor[l][k] * block->factor[l][k];
    if (!(pivot > T(0)) || pivot > T(1e30)) return l + 1;  // NaN fails too
    if (l < count) {
      pivots[0] = pivot < pivots[0] ? pivot : pivots[0];
      pivots[1] = pivot > pivots[1] ? pivot : pivots[1];
    }
    const T root = sizeof(T) == 4 ? T(__builtin_sqrtf(pivot)) : T(__builtin_sqrt(pivot));
    block->factor[l][l] = root;
    block->inverse[l] = T(1) / root;
    for (int i = l + 1; i < M; ++i) {
      T value = c[l * P + at + i];
      for (int k = 0; k < l; ++k) value -= block->factor[i][k] * block->factor[l][k];
      block->factor[i][l] = value * block->inverse[l];
    }
  }
  return 0;
}

// Panel I, of `rows` rows: subtracts from the columns of panel J what columns [from, stop)
// contribute.
template <class T>
void update(const T* panel_j, T* panel_i, int64_t rows, int64_t j, int64_t from, int64_t stop) {
  multiply<T, Store::subtract>(P, rows, stop - from, panel_j + from * P, 1, P, panel_i + from * P,
                               P, panel_i + j * P * P, P);
}

// Panel I below the diagonal: the columns of panels [first, last), all that is left of them.
template <class T>
void finish(T* packed, const T* inverse, int64_t rows, int64_t i, int64_t first, int64_t last) {
  constexpr int M = Tiling<T>::M;
  T* panel_i = packed + panel_start(i);
  for (int64_t j = first; j < last; ++j) {
    const T* panel_j = packed + panel_start(j);
    for (int b = 0; b < P; b += M) {
      const int64_t column = j * P + b, from = first * P;
      T* c = panel_i + column * P;
      multiply<T, Store::subtract>(M, rows, column - from, panel_j + from * P + b, 1, P,
                                   panel_i + from * P, P, c, P);
      Block<T> block;
      for (int l = 0; l < M; ++l) {
        block.inverse[l] = inverse[column + l];
        for (int i2 = l; i2 < M; ++i2) block.factor[i2][l] = panel_j[(column + l) * P + b + i2];
      }
      solve_block(block, rows, c);
    }
  }
}

// The panel on the diagonal, whose columns before `first` are already subtracted.
template <class T>
int64_t finish_diagonal(T* packed, T* inverse, T* pivots, int64_t n, int64_t i, int64_t first) {
  constexpr int M = Tiling<T>::M;
  const int64_t rows = rows_of(n, i);
  finish(packed, inverse, rows, i, first, i);
  for (int64_t a = rows; a < P; ++a) inverse[i * P + a] = T(1);
  T* panel = packed + panel_start(i);
  for (int b = 0; b < rows; b += M) {
    const int64_t column = i * P + b, from = first * P;
    T* c = panel + column * P;
    multiply<T, Store::subtract>(M, rows, column - from, panel + from * P + b, 1, P,
                                 panel + from * P, P, c, P);
    Block<T> block;
    if (const int failed = factor_block(c, b, n - column, &block, pivots)) return column + failed;
    solve_block(block, rows, c);
    for (int l = 0; l < M; ++l) {
      inverse[column + l] = block.inverse[l];
      for (int a = 0; a < b; ++a) c[l * P + a] = T(0);
      for (int a = 0; a < M; ++a) c[l * P + b + a] = a < l ? T(0) : block.factor[a][l];
    }
  }
  return 0;
}

template <class T>
void pack(int64_t n, const T* a, int64_t lda, T shift, T* packed, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1 && n > 128)
  for (int64_t i = 0; i < panels_of(n); ++i) {
    T* panel = packed + panel_start(i);
    for (int64_t l = 0; l < P; ++l) {
      const int64_t row = i * P + l;
      for (int64_t k = 0; k < (i + 1) * P; ++k)
        panel[k * P + l] = row < n && k <= row ? a[row * lda + k] : T(0);
      panel[row * P + l] = row < n ? panel[row * P + l] + shift : T(1);
    }
  }
}

template <class T>
int64_t factor(int64_t n, T* packed, T* inverse, T* pivots, int threads) {
  const int64_t count = panels_of(n);
  pivots[0] = T(1e30);
  pivots[1] = T(0);
  for (int64_t first = 0; first < count; first += group) {
    const int64_t last = least(count, first + group);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1 && first > 0)
    for (int64_t i = first; i < last; ++i)
      for (int64_t from = 0; from < first * P; from += depth)
        for (int64_t j = first; j <= i; ++j)
          update(packed + panel_start(j), packed + panel_start(i), rows_of(n, i), j, from,
                 least(first * P, from + depth));
    for (int64_t i = first; i < last; ++i)
      if (const int64_t failed = finish_diagonal(packed, inverse, pivots, n, i, first))
        return failed;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t i = last; i < count; ++i) {
      for (int64_t from = 0; from < first * P; from += depth)
        for (int64_t j = first; j < last; ++j)
          update(packed + panel_start(j), packed + panel_start(i), rows_of(n, i), j, from,
                 least(first * P, from + depth));
      finish(packed, inverse, rows_of(n, i), i, first, last);
    }
  }
  return 0;
}

template <class T>
void solve(int64_t n, int64_t c, const T* packed, const T* inverse, T* rhs, int64_t stride) {
  const int64_t count = panels_of(n), padded_c = padded<T>(c);
  // L z = y: rows of a panel are its lanes, so the products run over columns of the right side,
  // at most `chunk` of which are worked on at a time.
  constexpr int64_t chunk = 16;
  for (int64_t c0 = 0; c0 < c; c0 += chunk) {
    const int64_t cs = least(chunk, c - c0);
    alignas(64) T y[chunk * P];
    for (int64_t i = 0; i < count; ++i) {
      const T* panel = packed + panel_start(i);
      const int64_t rows = rows_of(n, i);
      T* at = rhs + i * P * stride + c0;
      multiply<T, Store::set>(cs, rows, i * P, rhs + c0, 1, stride, panel, P, y, P);
      for (int64_t k = 0; k < cs; ++k)
        for (int64_t a = 0; a < rows; ++a) y[k * P + a] = at[a * stride + k] - y[k * P + a];
      for (int64_t j = 0; j < rows; ++j) {  // the columns of the right side take turns
        const T* column = panel + (i * P + j) * P;
        for (int64_t k = 0; k < cs; ++k) {
          T* yk = y + k * P;
          const T z = yk[j] * inverse[i * P + j];
          at[j * stride + k] = z;
          for (int64_t a = j / Tiling<T>::W * Tiling<T>::W; a < rows; a += Tiling<T>::W)
            store(yk + a, load(yk + a) - z * load(column + a));
        }
      }
    }
  }
  // L^T a = z
  for (int64_t i = count - 1; i >= 0; --i) {
    const T* panel = packed + panel_start(i);
    const int64_t rows = rows_of(n, i);
    T* at = rhs + i * P * stride;
    for (int64_t j = rows - 1; j >= 0; --j) {
      const T* factors = panel + i * P * P + j;  // of row j, for the rows before it
      for (int64_t v = 0; v < padded_c; v += Tiling<T>::W) {
        T* column = at + v;
        const auto z = load(column + j * stride) * inverse[i * P + j];
        store(column + j * stride, z);
        for (int64_t a = 0; a < j; ++a)
          store(column + a * stride, load(column + a * stride) - z * factors[a * P]);
      }
    }
    if (i > 0)
      multiply<T, Store::subtract>(i * P, padded_c, rows, panel, P, 1, at, stride, rhs, stride);
  }
}

}  // namespace

extern const CholeskyTable NORMALIGN_VARIANT(cholesky) = {
    {pack<float>, factor<float>, solve<float>}, {pack<double>, factor<double>, solve<double>}};

}  // namespace normalign
