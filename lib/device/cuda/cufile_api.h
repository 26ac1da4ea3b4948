// SPDX-License-Identifier: Apache-2.0
// The part of NVIDIA's cuFile that is used (GPUDirect Storage), declared here because its header is rarely installed.
// From the cuFile API Reference Guide, https://docs.nvidia.com/gpudirect-storage/api-reference-guide/. Comments give
// NVIDIA's names.
#pragma once

#include <sys/types.h>

#include <cstddef>

namespace reshard::cufile {

// CUfileError_t, the result of most functions.
struct Error {
  int code;       // CUfileOpError; 0: success
  int cuda_code;  // CUresult, if `code` is a CUDA error
};
static_assert(sizeof(Error) == 8);

constexpr int kAlreadyOpen = 5026;  // CU_FILE_DRIVER_ALREADY_OPEN

// CUfileHandle_t: a registered file.
using Handle = void*;

// CUfileDescr_t: which file is to be registered.
struct Descriptor {
  int type = 1;  // CU_FILE_HANDLE_TYPE_OPAQUE_FD
  union {
    int fd;
    void* pointer;
  } handle = {};
  const void* file_system = nullptr;  // operations of a user-space file system; null: the kernel's
};
static_assert(sizeof(Descriptor) == 24);
static_assert(offsetof(Descriptor, handle) == 8 && offsetof(Descriptor, file_system) == 16);

// The library's functions. Thread-safe.
struct Functions {
  Error (*driver_open)() = nullptr;                          // cuFileDriverOpen
  Error (*handle_register)(Handle*, Descriptor*) = nullptr;  // cuFileHandleRegister
  void (*handle_deregister)(Handle) = nullptr;               // cuFileHandleDeregister
  // cuFileRead. Returns the number of bytes read to buffer + buffer_offset, which may be fewer than `size`; -1 with
  // errno; or a negated CUfileOpError.
  ssize_t (*read)(Handle handle, void* buffer, std::size_t size, off_t file_offset, off_t buffer_offset) = nullptr;
};

}  // namespace reshard::cufile
