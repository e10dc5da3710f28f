// Shared memory, barriers and warp collectives.
#include <cstdlib>

#include "machine_state.h"

namespace normalign {
namespace emu {

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

void fence() {
  Machine& m = machine();
  release(&m.fences);
  acquire(&m.fences);
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

uint64_t warp_collective(Collective kind, uint32_t mask, uint64_t value, int source, Where where,
                         void (*serve)(const uint64_t* values, Where where)) {
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
    uint64_t ballot = 0, values[32] = {};
    for (int l = 0; l < 32; ++l) {
      if (!(mask >> l & 1)) continue;
      values[l] = lanes[l].value;
      if (values[l]) ballot |= 1ull << l;
      if (kind == Collective::agree && values[l] != value)
        fail("lanes disagree about the arguments at " + text(where));
    }
    if (kind == Collective::serve) serve(values, where);
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
