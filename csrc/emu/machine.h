// Runs CUDA kernel bodies on the host: every CUDA thread is a fiber of one operating-system thread,
// so a kernel compiled by the host compiler executes with its real barriers, warp collectives and
// shared memory. It reports divergent barriers, wrong warp masks, deadlocks and oversized blocks
// itself; shared memory starts as NaN; the order in which threads run is chosen by
// NORMALIGN_EMU_ORDER (forward, reverse, random or random:SEED). Compiled with the address or
// thread sanitizer, out-of-bounds accesses and data races, also those between blocks, are reported
// as well.
//
// These files know nothing of CUDA's names; device.h gives those.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>

namespace normalign {
namespace emu {

struct Index3 {
  unsigned x, y, z;
};

// Where a collective stands in the source: all threads that meet must come from one line.
struct Where {
  const char* file;
  int line;
};

// A statically sized shared variable: one for each declaration, given new storage by each block.
struct SharedSlot {
  size_t bytes;
  char* storage;
  uint64_t block;
};

// Runs the body once for every thread of every block. Throws std::runtime_error with the place of
// the first mistake that the machine itself notices. The stream is only noted.
void launch(Index3 grid, Index3 block, size_t dynamic_shared, void* stream,
            const std::function<void()>& body);

// How many launches ran so far.
uint64_t launches();

// Where a launch ran: which device was current, and on which stream.
struct Launched {
  int device;
  void* stream;
};
constexpr uint64_t remembered_launches = 1024;
// Of launch k, one of the last `remembered_launches`.
Launched launched(uint64_t k);

// The current device, of `devices` that all are this host; false for one that does not exist.
constexpr int devices = 4;
int get_device();
bool set_device(int device);

// Bytes of dynamic shared memory that a block may have: 227 KiB, or less to stand for other GPUs.
int64_t shared_limit();
void set_shared_limit(int64_t bytes);

void* dynamic_shared();
char* shared(SharedSlot& slot);

// Returns how many threads of the block passed a predicate other than 0.
int block_barrier(bool predicate, Where where);

// What the lanes of a warp can do together. The last lane of the mask to arrive serves all.
enum class Collective { sync, shuffle, ballot, agree, serve };
// shuffle: the value of lane `source`, all bits set where that lane is not in the mask.
// ballot: the lanes whose value is not 0.
// agree: the values must be equal.
// serve: calls `serve` with the values of all 32 lanes.
uint64_t warp_collective(Collective kind, uint32_t mask, uint64_t value, int source, Where where,
                         void (*serve)(const uint64_t* values, Where where) = nullptr);

// For warp_matrix.h: a matrix in memory, which all lanes must see alike; and one lane's parts of
// d = a b + c with a (m, k) and b (k, n), element e of each in lane e % 32.
void warp_matrix_place(const void* p, unsigned ldm, size_t element, Where where);
struct MatrixProduct {
  int m, n, k;
  uint32_t rounded_away;  // bits of a and b that must be 0
  const float *a, *b, *c;
  float* d;
};
void warp_matrix_product(const MatrixProduct& own, Where where);

// Orders this thread after every thread that has passed a fence before.
void fence();

int lane();

}  // namespace emu
}  // namespace normalign
