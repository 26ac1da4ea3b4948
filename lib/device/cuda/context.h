// SPDX-License-Identifier: Apache-2.0
// CUDA's primary context of a GPU, which is shared within this process, and calls made in it. The caller's state is
// preserved: after a call the thread has the same current device as before, or none, and no context of another GPU was
// created.
#pragma once

#include <memory>
#include <string>

#include "lib/base/result.h"

struct CUctx_st;  // a CUcontext points to it

namespace reshard {

// Returns success for code 0, otherwise an error, "cuda:0: copying 1.00 MB to the device: out of memory". `code` is a
// cudaError_t. Clears CUDA's last error, because the next kernel launch would otherwise appear to have failed.
Status cuda_status(int ordinal, int code, const std::string& doing);

class CudaContext {
 public:
  // Returns the context of the `ordinal`-th GPU, creating it if needed. It lives as long as the result.
  static Result<std::shared_ptr<const CudaContext>> retain(int ordinal);
  ~CudaContext();
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  int ordinal() const { return ordinal_; }

  // Calls `call`, which returns a cudaError_t, with this GPU as the thread's current device.
  template <class Call>
  Status run(const std::string& doing, const Call& call) const {
    const Current current(*this);
    return cuda_status(ordinal_, current.error() != 0 ? current.error() : static_cast<int>(call()), doing);
  }

  // Makes this GPU the thread's current device during its lifetime.
  class Current {
   public:
    explicit Current(const CudaContext& context);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    int error() const { return error_; }  // a cudaError_t if that failed; 0 otherwise

   private:
    int error_;
  };

 private:
  CudaContext(int ordinal, int device, CUctx_st* context) : ordinal_(ordinal), device_(device), context_(context) {}
  int ordinal_;
  int device_;  // the driver's handle
  CUctx_st* context_;
};

}  // namespace reshard
