// Marks functions that also run on a GPU. A kernel's arithmetic stands in such functions, in headers that every
// compiler reads, so that ordinary tests run on the CPU what the GPU runs. RESHARD_UNROLL stands before a loop that a
// GPU's compiler is to write out, because it indexes what shall stay in registers; RESHARD_NO_UNROLL before one that it
// is not to, because it hardly ever goes round.
#pragma once

#ifdef __CUDACC__
#define RESHARD_HD __host__ __device__ __forceinline__
#else
// Inlined into functions compiled for other instruction sets, so that each gets its own vectorised loop.
#define RESHARD_HD inline __attribute__((always_inline))
#endif

#ifdef __CUDA_ARCH__
#define RESHARD_UNROLL _Pragma("unroll")
#define RESHARD_NO_UNROLL _Pragma("unroll 1")
#else
#define RESHARD_UNROLL
#define RESHARD_NO_UNROLL
#endif
