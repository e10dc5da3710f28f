#include "machine.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>
#include <stdexcept>

#include "machine_state.h"

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

Machine& machine() {
  static Machine* m = new Machine;  // kept for ever: its stacks may still be known to a sanitizer
  return *m;
}

namespace {

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

}  // namespace

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

void run_next(bool for_good) {
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

namespace {

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
  const size_t limit = machine().shared_limit;
  if (dynamic_bytes > limit)
    throw std::runtime_error("a block has at most " + std::to_string(limit) +
                             " bytes of shared memory, asked for " + std::to_string(dynamic_bytes));
}

}  // namespace

void launch(Index3 grid, Index3 block, size_t dynamic_bytes, void* stream,
            const std::function<void()>& body) {
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
  m.launched[m.launches % remembered_launches] = {m.device, stream};
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

Launched launched(uint64_t k) {
  return machine().launched[k % remembered_launches];
}

int get_device() {
  return machine().device;
}

int64_t shared_limit() {
  return static_cast<int64_t>(machine().shared_limit);
}

void set_shared_limit(int64_t bytes) {
  const auto wanted = static_cast<size_t>(bytes);
  machine().shared_limit = wanted < max_dynamic_shared ? wanted : max_dynamic_shared;
}

bool set_device(int device) {
  if (device < 0 || device >= devices) return false;
  machine().device = device;
  return true;
}

}  // namespace emu
}  // namespace normalign
