// Chooses the instruction set at run time: the best that the processor and the operating system
// support, or what NORMALIGN_CPU (auto, base, avx2, avx512) asks for.
#pragma once

namespace normalign {

enum class Isa { base = 0, avx2 = 1, avx512 = 2 };

Isa isa();       // in use
Isa best_isa();  // the best of this machine
const char* isa_name(Isa isa);
bool select_isa(const char* name);  // false: unknown, or not supported here

#if defined(NORMALIGN_X86_VARIANTS)
#define NORMALIGN_SELECT(topic)                                    \
  (::normalign::isa() == ::normalign::Isa::avx512 ? topic##_avx512 \
   : ::normalign::isa() == ::normalign::Isa::avx2 ? topic##_avx2   \
                                                  : topic##_base)
#else
#define NORMALIGN_SELECT(topic) (topic##_base)
#endif

}  // namespace normalign
