// What machine.cpp, which runs threads, and collectives.cpp, in which they meet, both know.
#pragma once
#include <cstring>
#include <string>

#include "device_state.h"
#include "sanitizers.h"
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace normalign {
namespace emu {

constexpr int max_threads = 1024;
constexpr int max_warps = max_threads / 32;
constexpr size_t page = 4096;
constexpr size_t stack_bytes = 128 << 10;
constexpr size_t hot_stack = 4 << 10;  // the part of a stack that a kernel really uses
constexpr size_t max_static_shared = 48 << 10;
constexpr size_t max_dynamic_shared = 227 << 10;
constexpr int generations = 16;  // synchronisation points that may be in use at one time
constexpr size_t sync_bytes = generations * (1 + max_threads);
constexpr size_t arena_bytes = sync_bytes + max_static_shared + max_dynamic_shared + (64 << 10);
// Block k runs on the thread sanitizer's fibers of set k % fiber_sets. Fibers are costly to make,
// and blocks of one set look ordered; blocks of different sets do not.
constexpr int fiber_sets = 4;

enum class State { ready, at_barrier, in_warp, done };
enum class Order { forward, reverse, random };

struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  Index3 index{};
  State state = State::done;
  Where where{"", 0};
  uint32_t mask = 0;
  int source = 0;
  uint64_t value = 0;   // what it brought to a collective
  uint64_t result = 0;  // what it takes away
  unsigned meetings = 0;
  void* asan_fake_stack = nullptr;
  void* tsan_fiber = nullptr;
#if !defined(__x86_64__)
  ucontext_t context;
#endif
};

struct Meeting {  // a collective that some lanes have reached
  uint32_t mask = 0, arrived = 0;
  Collective kind{};
  Where where{"", 0};
};

struct Warp {
  uint32_t alive = 0;
  int open = 0;
  Meeting meetings[32];
};

// Threads that can run. No allocation: it would look like one made by the kernel's threads.
struct ReadyRing {
  int thread[max_threads];  // each thread is in it at most once
  unsigned first = 0, size = 0;

  int& at(unsigned k) { return thread[(first + k) % max_threads]; }
  void push(int t) { at(size++) = t; }
  int take(unsigned k) {
    const int taken = at(k);
    if (k == 0) {
      first = (first + 1) % max_threads;
    } else {
      at(k) = at(size - 1);
    }
    --size;
    return taken;
  }
};

struct Machine {
  Fiber fibers[max_threads];
  Fiber host;
  Warp warps[max_warps];
  ReadyRing ready;
  const std::function<void()>* body = nullptr;
  char* arena = nullptr;
  size_t arena_used = 0, static_used = 0;
  char* dynamic = nullptr;
  int threads = 0, current = -1, alive = 0, waiting = 0;
  Where barrier_where{"", 0};
  unsigned barriers = 0;
  uint64_t block = 0, launches = 0, random = 0;
  int device = 0;
  size_t shared_limit = max_dynamic_shared;
  Launched launched[remembered_launches] = {};
  Order order = Order::forward;
  bool failed_before = false;
  std::string error;
  const void* host_stack = nullptr;
  size_t host_stack_bytes = 0;
  void* tsan_fibers[fiber_sets][max_threads] = {};
  char started = 0;   // an address: the launch comes before every thread's start
  char fences = 0;    // an address: of what has passed a fence
  char finished = 0;  // an address: every thread's end comes before the launch's end
};

Machine& machine();
// Abandons the block: its fibers never run again, and launch() throws.
[[noreturn]] void fail(const std::string& what);
void make_ready(int thread);
// Leaves the running fiber for another one, or for the host when all are done.
void run_next(bool for_good = false);
char* new_shared(size_t bytes);
void poison(char* memory, size_t bytes);

inline bool same(Where a, Where b) {
  return a.line == b.line && !std::strcmp(a.file, b.file);
}

inline std::string text(Where where) {
  const char* name = std::strrchr(where.file, '/');
  return std::string(name ? name + 1 : where.file) + ":" + std::to_string(where.line);
}

}  // namespace emu
}  // namespace normalign
