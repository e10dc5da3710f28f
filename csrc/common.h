// Shared by bindings and launch declarations. Plain C++: kernels that are compiled for several
// instruction sets include it, so nothing here may emit an inline function.
#pragma once
#include <cstdint>

#define NORMALIGN_CONCAT_(a, b) a##_##b
#define NORMALIGN_CONCAT(a, b) NORMALIGN_CONCAT_(a, b)
// The name of this translation unit's table: NORMALIGN_VARIANT(laplace_gram) -> laplace_gram_avx2.
#define NORMALIGN_VARIANT(topic) NORMALIGN_CONCAT(topic, NORMALIGN_ISA)

// Declares a topic's tables, one for each instruction set, and its selector `topic()`.
#define NORMALIGN_DECLARE_TABLES(Table, topic) \
  extern const Table topic##_base;             \
  extern const Table topic##_avx2;             \
  extern const Table topic##_avx512
