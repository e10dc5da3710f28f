#include "machine.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>

#include "device_state.h"
#include "sanitizers.h"
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#if defined(__x86_64__)
extern "C" void normalign_emu_switch(void** save, void* load);
asm(R"(
  .text
  .globl normalign_emu_switch
  .hidden normalign_emu_switch
  .type normalign_emu_switch, @function
normalign_emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size normalign_emu_switch, . - normalign_emu_switch
)");
#endif

namespace normalign {
namespace emu {

// What the kernels read; written at each switch.
Index3 grid_dim, block_dim, block_index, thread_index;

namespace {

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
  Order order = Order::forward;
  bool failed_before = false;
  std::string error;
  const void* host_stack = nullptr;
  size_t host_stack_bytes = 0;
  void* tsan_fibers[fiber_sets][max_threads] = {};
  char started = 0;   // an address: the launch comes before every thread's start
  char finished = 0;  // an address: every thread's end comes before the launch's end
};

Machine& machine() {
  static Machine* m = new Machine;  // kept for ever: its stacks may still be known to a sanitizer
  return *m;
}

bool same(Where a, Where b) {
  return a.line == b.line && !std::strcmp(a.file, b.file);
}

std::string text(Where where) {
  const char* name = std::strrchr(where.file, '/');
  return std::string(name ? name + 1 : where.file) + ":" + std::to_string(where.line);
}

void switch_to(Fiber& from, Fiber& to, bool for_good = false) {
  Machine& m = machine();
  const bool home = &to == &m.host;
  asan_leave(for_good ? nullptr : &from.asan_fake_stack, home ? m.host_stack : to.stack,
             home ? m.host_stack_bytes : stack_bytes);
  tsan_switch(to.tsan_fiber);
  thread_index = to.index;
#if defined(__x86_64__)
  normalign_emu_switch(&from.stack_pointer, to.stack_pointer);
#else
  swapcontext(&from.context, &to.context);
#endif
  asan_arrive(from.asan_fake_stack, nullptr, nullptr);
}

std::string waiting_threads() {
  Machine& m = machine();
  std::string list;
  int shown = 0;
  for (int i = 0; i < m.threads && shown < 4; ++i) {
    const Fiber& f = m.fibers[i];
    if (f.state != State::at_barrier && f.state != State::in_warp) continue;
    list += "; thread " + std::to_string(i) + " waits at " + text(f.where);
    ++shown;
  }
  return list;
}

// Abandons the block: its fibers never run again, and launch() throws.
[[noreturn]] void fail(const std::string& what) {
  Machine& m = machine();
  char place[120];
  std::snprintf(place, sizeof place, "block (%u,%u,%u) thread (%u,%u,%u): ", block_index.x,
                block_index.y, block_index.z, thread_index.x, thread_index.y, thread_index.z);
  m.error = place + what + waiting_threads();
  release(&m.finished);
  Fiber& from = m.fibers[m.current];
  m.current = -1;
  switch_to(from, m.host, true);
  std::abort();
}

void make_ready(int thread) {
  Machine& m = machine();
  m.fibers[thread].state = State::ready;
  m.ready.push(thread);
}

int take_ready() {
  Machine& m = machine();
  unsigned k = 0;
  if (m.order == Order::reverse) k = m.ready.size - 1;
  if (m.order == Order::random) {
    m.random ^= m.random << 13;
    m.random ^= m.random >> 7;
    m.random ^= m.random << 17;
    k = static_cast<unsigned>(m.random % m.ready.size);
  }
  return m.ready.take(k);
}

// Leaves the running fiber for another one, or for the host when all are done.
void run_next(bool for_good = false) {
  Machine& m = machine();
  Fiber& from = m.fibers[m.current];
  if (m.ready.size == 0) {
    if (m.alive > 0) fail("deadlock: no thread can run");
    m.current = -1;
    switch_to(from, m.host, for_good);
    return;
  }
  const int next = take_ready();
  if (next == m.current) return;
  m.current = next;
  switch_to(from, m.fibers[next], for_good);
}

void run_body() {
  Machine& m = machine();
  const void* bottom = nullptr;
  size_t bytes = 0;
  asan_arrive(nullptr, &bottom, &bytes);
  if (!m.host_stack) {
    m.host_stack = bottom;
    m.host_stack_bytes = bytes;
  }
  acquire(&m.started);
  (*m.body)();
  release(&m.finished);
  const int thread = m.current;
  Warp& warp = m.warps[thread / 32];
  const uint32_t bit = 1u << (thread % 32);
  m.fibers[thread].state = State::done;
  --m.alive;
  warp.alive &= ~bit;
  for (int i = 0; i < warp.open; ++i)
    if (warp.meetings[i].mask & bit) fail("a thread exits that its warp waits for");
  if (m.waiting > 0) fail("a thread exits while others wait at a barrier");
  run_next(true);
  std::abort();
}

void prepare(Fiber& f) {
  // A fiber that was abandoned, or that never returned, left its frames poisoned.
  unpoison(f.stack, stack_bytes);
  f.asan_fake_stack = nullptr;
  f.meetings = 0;
#if defined(__x86_64__)
  void** top = reinterpret_cast<void**>(f.stack + stack_bytes);
  *--top = nullptr;  // the stack is 16-byte aligned before the call that pushes a return address
  *--top = reinterpret_cast<void*>(&run_body);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  f.stack_pointer = top;
#else
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = f.stack;
  f.context.uc_stack.ss_size = stack_bytes;
  f.context.uc_link = nullptr;
  makecontext(&f.context, &run_body, 0);
#endif
}

void allocate() {
  Machine& m = machine();
  if (m.arena) return;
  const size_t each = page + stack_bytes;  // an unreadable page below each stack
  const size_t total = max_threads * each + arena_bytes;
  void* memory = mmap(nullptr, total, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  char* base = static_cast<char*>(memory);
  for (int i = 0; i < max_threads; ++i) {
    mprotect(base + i * each, page, PROT_NONE);
    m.fibers[i].stack = base + i * each + page;
  }
  m.arena = base + max_threads * each;
  adopt(memory, total);
}

void read_order() {
  Machine& m = machine();
  const char* order = std::getenv("NORMALIGN_EMU_ORDER");
  if (!order) order = "forward";
  m.order = Order::forward;
  if (!std::strcmp(order, "reverse")) {
    m.order = Order::reverse;
  } else if (!std::strncmp(order, "random", 6)) {
    m.order = Order::random;
    const uint64_t seed = order[6] == ':' ? std::strtoull(order + 7, nullptr, 10) : 0;
    m.random = 0x9E3779B97F4A7C15ull * (2 * seed + 1);
  } else if (std::strcmp(order, "forward")) {
    throw std::runtime_error(std::string("NORMALIGN_EMU_ORDER must be forward, reverse, random or "
                                         "random:SEED, got ") +
                             order);
  }
}

// All bits set: NaN. Through a volatile pointer, because a sanitizer watches memset and takes this
// for a write by the kernel.
void poison(char* memory, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i)
    static_cast<volatile char*>(memory)[i] = static_cast<char>(0xFF);
}

// Shared memory comes from the heap, each array on its own, so that the address sanitizer sees its
// ends; for the thread sanitizer it comes from the arena, whose history can be erased.
char* new_shared(size_t bytes) {
  Machine& m = machine();
  if (!tsan) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 128, bytes)) fail("out of memory");
    return static_cast<char*>(memory);
  }
  char* memory = m.arena + m.arena_used;
  m.arena_used += (bytes + 127) / 128 * 128;
  if (m.arena_used > arena_bytes) fail("out of shared memory");
  return memory;
}

void start_block(size_t dynamic_bytes) {
  Machine& m = machine();
  ++m.block;
  m.static_used = 0;
  if (tsan) {
    forget(m.arena, m.arena_used, true);
    for (int i = 0; i < m.threads; ++i)
      forget(m.fibers[i].stack + stack_bytes - hot_stack, hot_stack, false);
    m.arena_used = (sync_bytes + 127) / 128 * 128;
    if (dynamic_bytes) m.dynamic = new_shared(dynamic_bytes);
  }
  if (dynamic_bytes) poison(m.dynamic, dynamic_bytes);
  m.ready.size = 0;
  m.alive = m.threads;
  m.waiting = 0;
  for (int w = 0; w < max_warps; ++w) {
    const int lanes = m.threads - 32 * w;
    m.warps[w].open = 0;
    m.warps[w].alive = lanes >= 32 ? ~0u : lanes > 0 ? (1u << lanes) - 1 : 0u;
  }
  for (int i = 0; i < m.threads; ++i) {
    const unsigned t = static_cast<unsigned>(i);
    Fiber& f = m.fibers[i];
    f.index = {t % block_dim.x, t / block_dim.x % block_dim.y, t / block_dim.x / block_dim.y};
    void*& fiber = m.tsan_fibers[m.block % fiber_sets][i];
    if (!fiber) fiber = tsan_create();
    f.tsan_fiber = fiber;
    prepare(f);
    make_ready(i);
  }
}

void check_shape(Index3 grid, Index3 block, size_t dynamic_bytes) {
  const uint64_t threads = uint64_t(block.x) * block.y * block.z;
  if (threads < 1 || threads > max_threads || block.z > 64)
    throw std::runtime_error("a block has 1 to 1024 threads, got " + std::to_string(threads));
  if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
    throw std::runtime_error("no such grid: " + std::to_string(grid.x) + " x " +
                             std::to_string(grid.y) + " x " + std::to_string(grid.z));
  if (dynamic_bytes > max_dynamic_shared)
    throw std::runtime_error("a block has at most 227 KiB of shared memory, asked for " +
                             std::to_string(dynamic_bytes));
}

}  // namespace

void launch(Index3 grid, Index3 block, size_t dynamic_bytes, const std::function<void()>& body) {
  static std::mutex one_at_a_time;
  Machine& m = machine();
  check_shape(grid, block, dynamic_bytes);
  if (m.current != -1) throw std::runtime_error("a kernel launches a kernel");
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  allocate();
  read_order();
  m.error.clear();
  m.body = &body;
  m.threads = static_cast<int>(block.x * block.y * block.z);
  m.host.tsan_fiber = tsan_current();
  m.host_stack = nullptr;
  grid_dim = grid;
  block_dim = block;
  void* dynamic = nullptr;
  if (!tsan && dynamic_bytes && posix_memalign(&dynamic, 128, dynamic_bytes))
    throw std::bad_alloc();
  m.dynamic = static_cast<char*>(dynamic);
  release(&m.started);
  const uint64_t blocks = uint64_t(grid.x) * grid.y * grid.z;
  for (uint64_t k = 0; k < blocks && m.error.empty(); ++k) {
    const uint64_t b = m.order == Order::reverse ? blocks - 1 - k : k;
    block_index = {static_cast<unsigned>(b % grid.x), static_cast<unsigned>(b / grid.x % grid.y),
                   static_cast<unsigned>(b / grid.x / grid.y)};
    start_block(dynamic_bytes);
    m.current = take_ready();
    switch_to(m.host, m.fibers[m.current]);
  }
  acquire(&m.finished);  // once, here: blocks stay unordered among themselves
  std::free(dynamic);
  m.dynamic = nullptr;
  ++m.launches;
  if (m.error.empty()) return;
  for (auto& set : m.tsan_fibers)  // abandoned in the middle of a call
    for (void*& fiber : set) {
      if (fiber) tsan_destroy(fiber);
      fiber = nullptr;
    }
  throw std::runtime_error(m.error);
}

uint64_t launches() {
  return machine().launches;
}

int lane() {
  return machine().current % 32;
}

void* dynamic_shared() {
  return machine().dynamic;
}

char* shared(SharedSlot& slot) {
  Machine& m = machine();
  if (slot.block == m.block) return slot.storage;
  if (tsan || !slot.storage) slot.storage = new_shared(slot.bytes);
  slot.block = m.block;
  poison(slot.storage, slot.bytes);  // reading before writing shows
  m.static_used += slot.bytes;
  if (m.static_used > max_static_shared) fail("more than 48 KiB of static shared memory");
  return slot.storage;
}

int block_barrier(bool predicate, Where where) {
  Machine& m = machine();
  Fiber& f = m.fibers[m.current];
  // A thread may reach the next barrier before another has left this one: one address for each.
  char* sync = m.arena + m.barriers % generations;
  release(sync);
  if (m.waiting == 0)
    m.barrier_where = where;
  else if (!same(where, m.barrier_where))
    fail("threads of one block are at different barriers, one at " + text(where));
  if (m.alive != m.threads) fail("a barrier at " + text(where) + " after a thread has exited");
  f.state = State::at_barrier;
  f.where = where;
  f.value = predicate;
  if (++m.waiting == m.threads) {
    uint64_t count = 0;
    for (int i = 0; i < m.threads; ++i) count += m.fibers[i].value;
    m.waiting = 0;
    ++m.barriers;
    for (int i = 0; i < m.threads; ++i) {
      m.fibers[i].result = count;
      make_ready(i);
    }
  }
  run_next();
  acquire(sync);
  return static_cast<int>(f.result);
}

uint64_t warp_collective(Collective kind, uint32_t mask, uint64_t value, int source, Where where) {
  Machine& m = machine();
  const int first = m.current / 32 * 32;
  Fiber* lanes = m.fibers + first;
  Warp& warp = m.warps[first / 32];
  Fiber& f = m.fibers[m.current];
  const uint32_t bit = 1u << (m.current % 32);
  if (!(mask & bit)) fail("the calling lane is not in its own mask at " + text(where));
  if (mask & ~warp.alive) fail("the mask at " + text(where) + " names a lane that has exited");
  Meeting* meeting = nullptr;
  for (int i = 0; i < warp.open; ++i) {
    if (warp.meetings[i].mask == mask)
      meeting = &warp.meetings[i];
    else if (warp.meetings[i].mask & mask)
      fail("lanes disagree about the mask at " + text(where));
  }
  if (!meeting) {
    meeting = &warp.meetings[warp.open++];
    *meeting = {mask, 0, kind, where};
  } else if (meeting->kind != kind || !same(meeting->where, where)) {
    fail("lanes of one mask are at different operations, one at " + text(where));
  }
  f.state = State::in_warp;
  f.where = where;
  f.mask = mask;
  f.value = value;
  f.source = source;
  Fiber& leader = lanes[__builtin_ctz(mask)];
  char* sync =
      m.arena + generations * (1 + first + __builtin_ctz(mask)) + leader.meetings % generations;
  release(sync);
  meeting->arrived |= bit;
  if (meeting->arrived == mask) {
    uint64_t ballot = 0;
    for (int l = 0; l < 32; ++l)
      if (mask >> l & 1 && lanes[l].value) ballot |= 1ull << l;
    for (int l = 0; l < 32; ++l) {
      if (!(mask >> l & 1)) continue;
      const int from = lanes[l].source;
      if (kind == Collective::ballot) lanes[l].result = ballot;
      if (kind == Collective::shuffle)
        lanes[l].result = mask >> from & 1 ? lanes[from].value : ~0ull;
    }
    ++leader.meetings;
    *meeting = warp.meetings[--warp.open];
    for (int l = 0; l < 32; ++l)
      if (mask >> l & 1) make_ready(first + l);
  }
  run_next();
  acquire(sync);
  return f.result;
}

}  // namespace emu
}  // namespace normalign
