// Seeded mistakes in products of matrices by a warp; see seeded_bugs.cpp, the only place for this.
#pragma once
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "../cuda/warp_matrix.cuh"

namespace normalign {
namespace {

enum class Mistake {
  none,
  lane_left,      // a lane has returned before the product
  diverged,       // lanes make the product at two places
  stride,         // lanes see different distances between rows
  pitch,          // rows that are not 16 bytes apart
  alignment,      // a matrix that does not start at 32 bytes
  unrounded,      // a factor with the digits of float32
  uninitialised,  // sums that do not start at 0
  no_barrier,     // the matrix is read while other lanes still write it
  bounds          // rows so far apart that the last lies beyond the array
};

constexpr int seeded_pitch = 12;

// The first 64 entries of A A^T of a 16 x 8 matrix, by one warp.
__global__ void matrix_square(Mistake mistake, const float* in, float* out) {
  namespace wmma = nvcuda::wmma;
  NORMALIGN_SHARED(float, a, [16][seeded_pitch]);
  NORMALIGN_SHARED(float, square, [16][20]);
  const int lane = threadIdx.x;
  for (int e = lane; e < 16 * seeded_pitch; e += 32) {
    const int i = e / seeded_pitch, k = e % seeded_pitch;
    const float value = k < 8 ? in[(8 * i + k) % 128] : 0.0f;
    a[i][k] = mistake == Mistake::unrounded ? value * 1.0001f : wmma::__float_to_tf32(value);
  }
  if (mistake != Mistake::no_barrier) __syncwarp();
  if (mistake == Mistake::lane_left && lane == 7) return;
  wmma::fragment<wmma::matrix_a, 16, 16, 8, wmma::precision::tf32, wmma::row_major> left;
  wmma::fragment<wmma::matrix_b, 16, 16, 8, wmma::precision::tf32, wmma::col_major> right;
  wmma::fragment<wmma::accumulator, 16, 16, 8, float> sums;
  if (mistake != Mistake::uninitialised) wmma::fill_fragment(sums, 0.0f);
  const float* first = &a[0][0];
  if (mistake == Mistake::alignment) first += 4;
  unsigned pitch = seeded_pitch;
  if (mistake == Mistake::stride && lane == 7) pitch = 8;
  if (mistake == Mistake::pitch) pitch = seeded_pitch - 2;
  if (mistake == Mistake::bounds) pitch = seeded_pitch + 4;
  wmma::load_matrix_sync(left, first, pitch);
  wmma::load_matrix_sync(right, first, pitch);
  if (mistake == Mistake::diverged && lane < 16)
    wmma::mma_sync(sums, left, right, sums);
  else
    wmma::mma_sync(sums, left, right, sums);
  wmma::store_matrix_sync(&square[0][0], sums, 20, wmma::mem_row_major);
  __syncwarp();
  for (int e = lane; e < 64; e += 32) out[e] = square[e / 16][e % 16];
}

// Reads floats as hexadecimal words; prints each in tf32, as a float, and in bf16.
void print_rounded() {
  unsigned bits;
  while (std::scanf("%x", &bits) == 1) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    const float rounded = nvcuda::wmma::__float_to_tf32(value);
    std::memcpy(&bits, &rounded, sizeof bits);
    std::printf("%08x %04x\n", bits, __float2bfloat16_rn(value).bits);
  }
}

// Whether `name` is one of these kernels; then it has run, and what it should give is in
// `expected`.
bool run_matrix(const std::string& name, bool bad, const float* in, float* out,
                std::vector<float>& expected) {
  const char* const names[] = {"",
                               "matrix_lane_left",
                               "matrix_diverged",
                               "matrix_stride",
                               "matrix_pitch",
                               "matrix_alignment",
                               "matrix_unrounded",
                               "matrix_uninitialised",
                               "matrix_no_barrier",
                               "matrix_bounds"};
  int which = 0;
  for (int k = 1; k < 10; ++k)
    if (name == names[k]) which = k;
  if (which == 0) return false;
  const Mistake mistake = bad ? static_cast<Mistake>(which) : Mistake::none;
  NORMALIGN_LAUNCH(matrix_square, dim3(1), dim3(32), 0, nullptr, mistake, in, out);
  for (int e = 0; e < 64; ++e) {  // small integers: exact
    expected[e] = 0;
    for (int k = 0; k < 8; ++k) expected[e] += in[8 * (e / 16) + k] * in[8 * (e % 16) + k];
  }
  return true;
}

}  // namespace
}  // namespace normalign
