#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace normalign {
namespace {

std::atomic<int> current{-1};

bool parse(const char* name, Isa* out) {
  const Isa best = best_isa();
  if (!std::strcmp(name, "auto")) {
    *out = best;
    return true;
  }
  for (Isa candidate : {Isa::base, Isa::avx2, Isa::avx512}) {
    if (!std::strcmp(name, isa_name(candidate)) && candidate <= best) {
      *out = candidate;
      return true;
    }
  }
  return false;
}

}  // namespace

Isa best_isa() {
#if defined(NORMALIGN_X86_VARIANTS)
  __builtin_cpu_init();  // reads XCR0 too: the operating system must save the registers
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::base;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return Isa::avx512;
  return Isa::avx2;
#else
  return Isa::base;
#endif
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx512: return "avx512";
    case Isa::avx2: return "avx2";
    default: return "base";
  }
}

Isa isa() {
  int value = current.load(std::memory_order_relaxed);
  if (value < 0) {
    Isa chosen = best_isa();
    const char* wanted = std::getenv("NORMALIGN_CPU");
    if (wanted) parse(wanted, &chosen);
    value = static_cast<int>(chosen);
    current.store(value, std::memory_order_relaxed);
  }
  return static_cast<Isa>(value);
}

bool select_isa(const char* name) {
  Isa chosen;
  if (!parse(name, &chosen)) return false;
  current.store(static_cast<int>(chosen), std::memory_order_relaxed);
  return true;
}

}  // namespace normalign
