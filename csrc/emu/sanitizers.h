// What the sanitizers must be told about fibers. machine.cpp is itself never instrumented (its
// state is not the kernel's), so the build says with NORMALIGN_EMU_ASAN or NORMALIGN_EMU_TSAN which
// one is linked.
#pragma once
#include <cstddef>

#if defined(NORMALIGN_EMU_ASAN)
extern "C" {
void __sanitizer_start_switch_fiber(void** fake_stack_save, const void* bottom, size_t size);
void __sanitizer_finish_switch_fiber(void* fake_stack_save, const void** bottom_old,
                                     size_t* size_old);
void __asan_unpoison_memory_region(void const volatile* address, size_t size);
}
#endif
#if defined(NORMALIGN_EMU_TSAN)
extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
// The interface for managed heaps is the only one that lets a range forget its history. Stacks and
// shared memory need that: every block uses the same addresses, and that is no race.
void __tsan_java_init(unsigned long begin, unsigned long size);
void __tsan_java_alloc(unsigned long begin, unsigned long size);
void __tsan_java_free(unsigned long begin, unsigned long size);
}
#endif

namespace normalign {
namespace emu {
namespace {

#if defined(NORMALIGN_EMU_TSAN)
constexpr bool tsan = true;
// No order follows from the switch itself: only from barriers and warp collectives.
inline void tsan_switch(void* fiber) {
  __tsan_switch_to_fiber(fiber, 1);
}
inline void* tsan_current() {
  return __tsan_get_current_fiber();
}
inline void* tsan_create() {
  return __tsan_create_fiber(0);
}
inline void tsan_destroy(void* fiber) {
  __tsan_destroy_fiber(fiber);
}
inline void release(void* address) {
  __tsan_release(address);
}
inline void acquire(void* address) {
  __tsan_acquire(address);
}
inline void adopt(void* begin, size_t bytes) {
  __tsan_java_init(reinterpret_cast<unsigned long>(begin), bytes);
}
inline void forget(void* begin, size_t bytes, bool synchronisation) {
  if (synchronisation) __tsan_java_free(reinterpret_cast<unsigned long>(begin), bytes);
  __tsan_java_alloc(reinterpret_cast<unsigned long>(begin), bytes);
}
#else
constexpr bool tsan = false;
inline void tsan_switch(void*) {}
inline void* tsan_current() {
  return nullptr;
}
inline void* tsan_create() {
  return nullptr;
}
inline void tsan_destroy(void*) {}
inline void release(void*) {}
inline void acquire(void*) {}
inline void adopt(void*, size_t) {}
inline void forget(void*, size_t, bool) {}
#endif

#if defined(NORMALIGN_EMU_ASAN)
inline void asan_leave(void** fake_stack, const void* bottom, size_t bytes) {
  __sanitizer_start_switch_fiber(fake_stack, bottom, bytes);
}
inline void asan_arrive(void* fake_stack, const void** bottom, size_t* bytes) {
  __sanitizer_finish_switch_fiber(fake_stack, bottom, bytes);
}
inline void unpoison(void* begin, size_t bytes) {
  __asan_unpoison_memory_region(begin, bytes);
}
#else
inline void asan_leave(void**, const void*, size_t) {}
inline void asan_arrive(void*, const void**, size_t*) {}
inline void unpoison(void*, size_t) {}
#endif

}  // namespace
}  // namespace emu
}  // namespace normalign
