// SPDX-License-Identifier: Apache-2.0
// RESHARD_HD marks functions that also run on a GPU. A kernel's arithmetic is in such functions, in headers that every
// compiler can read, so that ordinary tests run it on the CPU. RESHARD_UNROLL precedes a loop that a GPU compiler must
// unroll, because it indexes values that must stay in registers; RESHARD_NO_UNROLL precedes a loop that rarely
// iterates.
#pragma once

#ifdef __CUDACC__
#define RESHARD_HD __host__ __device__ __forceinline__
#else
// Always inlined into functions compiled for other instruction sets, so that each gets its own vectorised loop.
#define RESHARD_HD inline __attribute__((always_inline))
#endif

#ifdef __CUDA_ARCH__
#define RESHARD_UNROLL _Pragma("unroll")
#define RESHARD_NO_UNROLL _Pragma("unroll 1")
#else
#define RESHARD_UNROLL
#define RESHARD_NO_UNROLL
#endif
