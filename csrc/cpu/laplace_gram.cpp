#include "laplace_gram.h"

#include "point_panel.h"
#include "threads.h"

namespace normalign {
namespace {

template <class T>
void pack(int64_t n, int64_t width, const T* x, int64_t ldx, T scale, T* panels, int threads) {
  const int64_t count = panels_of(n);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && count > 8)
  for (int64_t p = 0; p < count; ++p)
    pack_panel(least(P, n - p * P), width, x + p * P * ldx, ldx, scale, panels + p * width * P);
}

template <class T>
void gram(int kernel, T exponent, bool weights, int64_t m, int64_t n, int64_t width, const T* x,
          const T* z, T* out, int64_t ldo, int threads) {
  const int64_t row_panels = panels_of(m), column_panels = panels_of(n);
  // Rows of the result are columns of a tile: its lanes then are contiguous in the result.
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && m * n > 16384)
  for (int64_t i = 0; i < row_panels; ++i) {
    alignas(64) T tile[P * P];
    const int64_t rows = least(P, m - i * P);
    for (int64_t j = 0; j < column_panels; ++j) {
      pair_tile<T>(static_cast<Kernel>(kernel), width, z + j * width * P, x + i * width * P, rows,
                   exponent, weights ? nullptr : tile, weights ? tile : nullptr);
      const int64_t columns = least(P, n - j * P);
      for (int64_t a = 0; a < rows; ++a) {
        T* to = out + (i * P + a) * ldo + j * P;
        for (int64_t b = 0; b < columns; b += Tiling<T>::W)
          store_n(to + b, load(tile + a * P + b), columns - b);
      }
    }
  }
}

// Panel i of a packed lower triangle, whose `rows` points are few: they are the columns of tiles.
template <class T>
void gram_last_panel(int kernel, T exponent, int64_t rows, int64_t i, int64_t width, const T* x,
                     T* panel) {
  alignas(64) T tile[P * P];
  for (int64_t j = 0; j <= i; ++j) {
    pair_tile<T>(static_cast<Kernel>(kernel), width, x + j * width * P, x + i * width * P, rows,
                 exponent, tile, nullptr);
    T* to = panel + j * P * P;
    for (int64_t b = 0; b < P; ++b)
      for (int64_t a = 0; a < rows; ++a) to[b * P + a] = tile[a * P + b];
  }
}

template <class T>
void gram_packed(int kernel, T exponent, int64_t n, int64_t width, const T* x, const T* ridge,
                 T shift, T* packed, int threads) {
  const int64_t count = panels_of(n);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1 && n > 128)
  for (int64_t reversed = 0; reversed < count; ++reversed) {
    const int64_t i = count - 1 - reversed;  // the longest panel first
    const int64_t rows = least(P, n - i * P);
    T* panel = packed + P * P * (i * (i + 1) / 2);
    T* diagonal = panel + i * P * P;
    if (2 * rows <= P) {
      gram_last_panel(kernel, exponent, rows, i, width, x, panel);
    } else {
      for (int64_t j = 0; j <= i; ++j)
        pair_tile<T>(static_cast<Kernel>(kernel), width, x + i * width * P, x + j * width * P, P,
                     exponent, panel + j * P * P, nullptr);
    }
    for (int64_t a = 0; a < rows; ++a)
      diagonal[a * P + a] += shift + (ridge ? ridge[i * P + a] : T(0));
    if (rows == P) continue;
    for (int64_t k = 0; k < (i + 1) * P; ++k)
      for (int64_t a = rows; a < P; ++a) panel[k * P + a] = T(0);
    for (int64_t b = rows; b < P; ++b) {
      for (int64_t a = 0; a < P; ++a) diagonal[b * P + a] = T(0);
      diagonal[b * P + b] = T(1);
    }
  }
}

template <class T>
void matvec(int kernel, T exponent, int64_t m, int64_t n, int64_t c, int64_t width, const T* x,
            const T* z, const T* coef, int64_t ldc, T* out, int64_t ldo, T* workspace,
            int threads) {
  const int64_t row_panels = panels_of(m), column_panels = panels_of(n);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && m * n > 16384)
  for (int64_t i = 0; i < row_panels; ++i) {
    alignas(64) T tile[P * P];
    T* sum = workspace + thread_index() * P * c;  // (c, P)
    for (int64_t k = 0; k < c * P; ++k) sum[k] = T(0);
    for (int64_t j = 0; j < column_panels; ++j) {
      const int64_t columns = least(P, n - j * P);
      pair_tile<T>(static_cast<Kernel>(kernel), width, x + i * width * P, z + j * width * P,
                   columns, exponent, tile, nullptr);
      multiply<T, Store::add>(c, P, columns, coef + j * P * ldc, 1, ldc, tile, P, sum, P);
    }
    const int64_t rows = least(P, m - i * P);
    for (int64_t a = 0; a < rows; ++a)
      for (int64_t k = 0; k < c; ++k) out[(i * P + a) * ldo + k] = sum[k * P + a];
  }
}

template <class T>
void matvec_symmetric(int kernel, T exponent, int64_t n, int64_t c, int64_t width, const T* x,
                      const T* coef, T* out, int64_t stride, T* workspace, int threads) {
  const int64_t count = panels_of(n), size = count * P * stride;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    alignas(64) T tile[P * P];
    T* own = workspace + thread_index() * (size + P * c);
    T* lanes = own + size;  // (c, P)
    for (int64_t e = 0; e < size; ++e) own[e] = T(0);
#pragma omp for schedule(dynamic)
    for (int64_t reversed = 0; reversed < count; ++reversed) {
      const int64_t i = count - 1 - reversed;
      for (int64_t e = 0; e < P * c; ++e) lanes[e] = T(0);
      for (int64_t j = 0; j <= i; ++j) {
        pair_tile<T>(static_cast<Kernel>(kernel), width, x + i * width * P, x + j * width * P, P,
                     exponent, tile, nullptr);
        multiply<T, Store::add>(c, P, P, coef + j * P * stride, 1, stride, tile, P, lanes, P);
        if (i != j)
          multiply<T, Store::add>(P, c, P, tile, P, 1, coef + i * P * stride, stride,
                                  own + j * P * stride, stride);
      }
      for (int64_t a = 0; a < P; ++a)
        for (int64_t k = 0; k < c; ++k) own[(i * P + a) * stride + k] += lanes[k * P + a];
    }
#pragma omp for schedule(static)
    for (int64_t e = 0; e < size; ++e) {
      T sum = T(0);
      for (int t = 0; t < threads; ++t) sum += workspace[t * (size + P * c) + e];
      out[e] = sum;
    }
  }
}

}  // namespace

extern const LaplaceTable NORMALIGN_VARIANT(laplace_gram) = {
    {pack<float>, gram<float>, gram_packed<float>, matvec<float>, matvec_symmetric<float>},
    {pack<double>, gram<double>, gram_packed<double>, matvec<double>, matvec_symmetric<double>}};

}  // namespace normalign
