#include "agop.h"

#include "point_panel.h"
#include "threads.h"

namespace normalign {
namespace {

// Rows are rounded up to 16 elements, whole vectors of every instruction set and type.
NORMALIGN_INLINE int64_t row_length(int64_t n) {
  return (n + 15) / 16 * 16;
}

// values[j] = (a_jk, a_jk z_j) for every class k: what W is multiplied with.
template <class T>
void fill_values(int64_t n, int64_t c, int64_t width, const T* points, const T* coef, int64_t ldc,
                 T* values) {
  const int64_t ldq = row_length(c * (width + 1));
  for (int64_t j = 0; j < panels_of(n) * P; ++j) {
    T* v = values + j * ldq;
    int64_t at = 0;
    for (int64_t k = 0; j < n && k < c; ++k) {
      const T a = coef[j * ldc + k];
      v[at++] = a;
      for (int64_t t = 0; t < width; ++t) v[at++] = a * points[j * width + t];
    }
    while (at < ldq) v[at++] = T(0);
  }
}

// Adds up x^T y over blocks of rows: in the type itself over some hundred rows, whose rounding is
// small, then in double.
template <class T>
struct ProductSum {
  static constexpr int64_t most_rows = 512;
  int64_t width;
  T* product;  // (width, ldr)
  double* total;
  int64_t rows = 0;

  void add(int64_t count, const T* x, const T* y, double scale = 1) {
    const int64_t ldr = row_length(width);
    if (scale != 1) flush();
    if (rows == 0)
      multiply<T, Store::set>(width, width, count, x, 1, ldr, y, ldr, product, ldr);
    else
      multiply<T, Store::add>(width, width, count, x, 1, ldr, y, ldr, product, ldr);
    rows += count;
    if (rows >= most_rows || scale != 1) flush(scale);
  }
  void flush(double scale = 1) {
    const int64_t ldr = row_length(width);
    for (int64_t a = 0; rows > 0 && a < width; ++a)
      for (int64_t b = 0; b < width; ++b)
        total[a * width + b] += scale * double(product[a * ldr + b]);
    rows = 0;
  }
};

// at[t] = root * (s x[t] - u[t]); returns the largest size so far, lane by lane.
template <class T, class V = typename Simd<T>::V>
NORMALIGN_INLINE V fill_gradient(int64_t width, int64_t ldr, T root, T s, const T* x, const T* u,
                                 T* at, V largest) {
  constexpr int W = Simd<T>::width;
  for (int64_t t = 0; t < ldr; t += W) {
    const V h = root * (s * load_n(x + t, width - t) - load_n(u + t, width - t));
    store(at + t, h);
    largest = at_least(h < 0 ? -h : h, largest);
  }
  return largest;
}

// Adds the outer products of one panel's gradients h to r: sums hold (s, sum_j W a z) per class,
// and h = s x - sum_j W a z. h is scaled to 1 first where squares would leave the range of the
// type.
template <class T>
void add_outer_products(int64_t rows, int64_t c, int64_t width, const T* points, const T* weight,
                        const T* sums, T* h, ProductSum<T>& r) {
  constexpr int W = Simd<T>::width;
  constexpr T least_safe = sizeof(T) == 4 ? T(1e-12) : T(1e-120);
  constexpr T most_safe = sizeof(T) == 4 ? T(1e12) : T(1e120);
  const int64_t ldq = row_length(c * (width + 1)), ldr = row_length(width);
  typename Simd<T>::V sizes{};
  for (int64_t i = 0; i < rows; ++i) {
    const T root = !weight          ? T(1)
                   : sizeof(T) == 4 ? T(__builtin_sqrtf(weight[i]))
                                    : T(__builtin_sqrt(weight[i]));
    for (int64_t k = 0; k < c; ++k) {
      const T* u = sums + i * ldq + k * (width + 1);
      sizes = fill_gradient(width, ldr, root, u[0], points + i * width, u + 1,
                            h + (i * c + k) * ldr, sizes);
    }
  }
  T largest = T(0);
  for (int l = 0; l < W; ++l) largest = sizes[l] > largest ? sizes[l] : largest;
  const bool safe = largest > least_safe && largest < most_safe;
  const T scale = T(1) / largest;
  if (!safe && scale > T(0) && scale < (sizeof(T) == 4 ? T(1e38) : T(1e300))) {
    for (int64_t e = 0; e < rows * c * ldr; ++e) h[e] *= scale;
    r.add(rows * c, h, h, double(largest) * double(largest));
  } else {
    r.add(rows * c, h, h);
  }
}

template <class T>
void clear(T* p, int64_t n) {
  for (int64_t i = 0; i < n; ++i) p[i] = T(0);
}

template <class T>
void tiles(int kernel, T exponent, int64_t n, int64_t c, int64_t width, const T* panels,
           const T* points, const T* coef, int64_t ldc, const T* weight, T* values, T* sums,
           T* block, double* r, int threads) {
  const int64_t count = panels_of(n), q = c * (width + 1), ldq = row_length(q);
  const int64_t size = count * P * ldq;
  const int64_t block_size = (P * c + width) * row_length(width);
  clear(r, threads * width * width);
  fill_values(n, c, width, points, coef, ldc, values);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int thread = thread_index();
    alignas(64) T w[P * P];
    T* own = sums + thread * size;
    T* h = block + thread * block_size;
    ProductSum<T> outer{width, h + P * c * row_length(width), r + thread * width * width};
    clear(own, size);
#pragma omp for schedule(dynamic)
    for (int64_t reversed = 0; reversed < count; ++reversed) {
      const int64_t i = count - 1 - reversed;
      for (int64_t j = 0; j <= i; ++j) {
        pair_tile<T>(static_cast<Kernel>(kernel), width, panels + i * width * P,
                     panels + j * width * P, P, exponent, nullptr, w);
        multiply<T, Store::add>(P, q, P, w, P, 1, values + i * P * ldq, ldq, own + j * P * ldq,
                                ldq);
        if (i != j)
          multiply<T, Store::add>(P, q, P, w, 1, P, values + j * P * ldq, ldq, own + i * P * ldq,
                                  ldq);
      }
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count; ++i) {
      T* total = sums + i * P * ldq;
      for (int other = 1; other < threads; ++other)
        for (int64_t e = 0; e < P * ldq; ++e) total[e] += sums[other * size + i * P * ldq + e];
      add_outer_products(least(P, n - i * P), c, width, points + i * P * width,
                         weight ? weight + i * P : nullptr, total, h, outer);
    }
    outer.flush();
  }
}

template <class T>
void streamed(int kernel, T exponent, int64_t m, int64_t n, int64_t c, int64_t width,
              const T* x_panels, const T* x, const T* z_panels, const T* z, const T* coef,
              int64_t ldc, const T* weight, T* values, T* sums, T* block, double* r, int threads) {
  const int64_t q = c * (width + 1), ldq = row_length(q);
  const int64_t block_size = (P * c + width) * row_length(width);
  clear(r, threads * width * width);
  fill_values(n, c, width, z, coef, ldc, values);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int thread = thread_index();
    alignas(64) T w[P * P];
    T* own = sums + thread * P * ldq;
    T* h = block + thread * block_size;
    ProductSum<T> outer{width, h + P * c * row_length(width), r + thread * width * width};
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < panels_of(m); ++i) {
      clear(own, P * ldq);
      for (int64_t j = 0; j < panels_of(n); ++j) {
        pair_tile<T>(static_cast<Kernel>(kernel), width, x_panels + i * width * P,
                     z_panels + j * width * P, P, exponent, nullptr, w);
        multiply<T, Store::add>(P, q, P, w, 1, P, values + j * P * ldq, ldq, own, ldq);
      }
      add_outer_products(least(P, m - i * P), c, width, x + i * P * width,
                         weight ? weight + i * P : nullptr, own, h, outer);
    }
    outer.flush();
  }
}

// --- the Gram form
//
// Off the diagonal B_ij = (W diag(v) W)_ij (a_i . a_j) - W_ij (v_i s_i . a_j + a_i . v_j s_j) with
// v the weights and s = W a. Gradients do not move with the origin, so rows of B sum to 0, which
// gives its diagonal, and R = sum over pairs of -B_ij (x_i - x_j)(x_i - x_j)^T / 2.

// Full rows of W for every panel: w + i * 48 * rows is [j][lane].
template <class T>
void fill_weights(int kernel, T exponent, int64_t n, int64_t width, const T* panels, T* w,
                  int threads) {
  const int64_t count = panels_of(n), rows = count * P;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
  for (int64_t reversed = 0; reversed < count; ++reversed) {
    const int64_t i = count - 1 - reversed;
    for (int64_t j = 0; j <= i; ++j) {
      T* tile = w + (i * rows + j * P) * P;
      pair_tile<T>(static_cast<Kernel>(kernel), width, panels + i * width * P,
                   panels + j * width * P, P, exponent, nullptr, tile);
      for (int64_t a = 0; a < P; ++a)  // points that only fill a panel have no part
        for (int64_t b = 0; b < P; ++b)
          if (j * P + a >= n || i * P + b >= n) tile[a * P + b] = T(0);
      if (i == j) continue;
      T* mirror = w + (j * rows + i * P) * P;
      for (int64_t a = 0; a < P; ++a)
        for (int64_t b = 0; b < P; ++b) mirror[a * P + b] = tile[b * P + a];
    }
  }
}

// What each thread of the Gram form works in.
template <class T>
struct GramRows {
  T *b, *row_sums, *y, *product;
  static int64_t size(int64_t rows, int64_t width) {
    return P * rows + rows + (P + width) * row_length(width);
  }
  GramRows(T* p, int64_t rows, int64_t width)
      : b(p), row_sums(b + P * rows), y(row_sums + rows), product(y + P * row_length(width)) {}
};

// Rows of B for one panel, columns up to its own: b[j][lane]; their sums go to row_sums.
template <class T>
void fill_b(int64_t i, int64_t rows, int64_t c, const T* w, const T* lanes, const T* weight,
            int64_t n, GramRows<T>& own) {
  constexpr int64_t depth = 192;
  const T *a = lanes, *s = lanes + rows * c;  // [panel][c][lane]
  T* scaled = own.b;
  clear(scaled, (i + 1) * P * P);
  alignas(64) T chunk[depth * P];
  for (int64_t from = 0; from < rows; from += depth) {
    const int64_t count = least(depth, rows - from);
    const T* mine = w + (i * rows + from) * P;
    if (weight) {
      for (int64_t k = 0; k < count; ++k)
        for (int64_t l = 0; l < P; ++l)
          chunk[k * P + l] = mine[k * P + l] * (from + k < n ? weight[from + k] : T(0));
      mine = chunk;
    }
    for (int64_t j = 0; j <= i; ++j)
      multiply<T, Store::add>(P, P, count, w + (j * rows + from) * P, 1, P, mine, P,
                              scaled + j * P * P, P);
  }
  for (int64_t j = 0; j <= i; ++j) {
    alignas(64) T inner[P * P], mixed[P * P];
    const T *ai = a + i * c * P, *aj = a + j * c * P, *si = s + i * c * P, *sj = s + j * c * P;
    multiply<T, Store::set>(P, P, c, aj, 1, P, ai, P, inner, P);
    multiply<T, Store::set>(P, P, c, sj, 1, P, ai, P, mixed, P);
    multiply<T, Store::add>(P, P, c, aj, 1, P, si, P, mixed, P);
    T* b = scaled + j * P * P;
    const T* tile = w + (i * rows + j * P) * P;
    for (int64_t x = 0; x < P; ++x) {
      T sum = T(0);
      for (int64_t l = 0; l < P; ++l) {
        T value = b[x * P + l] * inner[x * P + l] - tile[x * P + l] * mixed[x * P + l];
        value = i == j && x == l ? T(0) : value;
        b[x * P + l] = value;
        sum += value;
      }
      if (i != j) {
        own.row_sums[j * P + x] += sum;
        for (int64_t l = 0; l < P; ++l) own.row_sums[i * P + l] += b[x * P + l];
      } else {
        own.row_sums[i * P + x] += sum;
      }
    }
  }
}

template <class T>
double gram(int kernel, T exponent, int64_t n, int64_t c, int64_t width, const T* panels,
            const T* points, const T* coef, int64_t ldc, const T* weight, T* w, T* lanes,
            T* padded_points, T* workspace, double* r, int threads) {
  const int64_t count = panels_of(n), rows = count * P, ldr = row_length(width);
  clear(r, threads * width * width);
  clear(padded_points, rows * ldr);
  for (int64_t i = 0; i < n; ++i)
    for (int64_t t = 0; t < width; ++t) padded_points[i * ldr + t] = points[i * width + t];
  fill_weights(kernel, exponent, n, width, panels, w, threads);
  for (int64_t i = 0; i < count; ++i) {
    T *a = lanes + i * c * P, *s = lanes + rows * c + i * c * P;
    for (int64_t k = 0; k < c; ++k)
      for (int64_t l = 0; l < P; ++l)
        a[k * P + l] = i * P + l < n ? coef[(i * P + l) * ldc + k] : T(0);
    multiply<T, Store::set>(c, P, n, coef, 1, ldc, w + i * rows * P, P, s, P);
    for (int64_t k = 0; weight && k < c; ++k)
      for (int64_t l = 0; l < P; ++l) s[k * P + l] *= i * P + l < n ? weight[i * P + l] : T(0);
  }
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int thread = thread_index();
    GramRows<T> own(workspace + thread * GramRows<T>::size(rows, width), rows, width);
    ProductSum<T> half{width, own.product, r + thread * width * width};  // P in R = P + P^T
    clear(own.row_sums, rows);
#pragma omp for schedule(dynamic)
    for (int64_t reversed = 0; reversed < count; ++reversed) {
      const int64_t i = count - 1 - reversed;
      fill_b(i, rows, c, w, lanes, weight, n, own);
      T* diagonal = own.b + i * P * P;
      for (int64_t e = 0; e < P * P; ++e) diagonal[e] *= T(0.5);
      multiply<T, Store::set>(P, width, (i + 1) * P, own.b, 1, P, padded_points, ldr, own.y, ldr);
      half.add(P, padded_points + i * P * ldr, own.y);
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t l = 0; l < P; ++l) {
        T sum = T(0);
        for (int other = 0; other < threads; ++other)
          sum += (workspace + other * GramRows<T>::size(rows, width) + P * rows)[i * P + l];
        for (int64_t t = 0; t < ldr; ++t)
          own.y[l * ldr + t] = T(-0.5) * sum * padded_points[(i * P + l) * ldr + t];
      }
      half.add(P, padded_points + i * P * ldr, own.y);
    }
    half.flush();
  }
  double squares = 0;
  for (int64_t i = 0; i < n; ++i) {
    const T* x = padded_points + i * ldr;
    double sum = 0, size = 0;
    for (int t = 0; t < threads; ++t)
      sum += double((workspace + t * GramRows<T>::size(rows, width) + P * rows)[i]);
    for (int64_t t = 0; t < width; ++t) size += double(x[t]) * double(x[t]);
    squares -= sum * size;
  }
  for (int64_t a = 0; a < width; ++a)
    for (int64_t b = 0; b <= a; ++b) {
      double sum = 0;
      for (int t = 0; t < threads; ++t)
        sum += r[(t * width + a) * width + b] + r[(t * width + b) * width + a];
      for (int t = 0; t < threads; ++t)
        r[(t * width + a) * width + b] = r[(t * width + b) * width + a] = t == 0 ? sum : 0;
    }
  return squares;
}

}  // namespace

extern const AgopTable NORMALIGN_VARIANT(agop) = {{tiles<float>, streamed<float>, gram<float>},
                                                  {tiles<double>, streamed<double>, gram<double>}};

}  // namespace normalign
