// Tensor cores through nvcuda::wmma, which hides how elements are spread over the lanes.
#pragma once
#include "portable.cuh"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <mma.h>
#else
#include "../emu/warp_matrix.h"
#endif

// Before sm_80 there is neither tf32 nor bf16, and even their names are missing.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define NORMALIGN_TENSOR_CORES
#endif
