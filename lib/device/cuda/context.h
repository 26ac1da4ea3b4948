// What this process shares of a GPU, CUDA's primary context, and calls made in it. Nothing of the caller's is changed:
// after a call its thread has the current device it had before, or none, and no context of another GPU was made.
#pragma once

#include <memory>
#include <string>

#include "lib/base/result.h"

struct CUctx_st;  // what a CUcontext points to

namespace reshard {

// Nothing for code 0; else an error, "cuda:0: copying 1.00 MB to the device: out of memory". `code`: a cudaError_t,
// which is no longer CUDA's last error then: the next kernel would be taken to have failed.
Status cuda_status(int ordinal, int code, const std::string& doing);

class CudaContext {
 public:
  // Of the `ordinal`-th GPU; made if nobody has made it yet, and kept as long as this is.
  static Result<std::shared_ptr<const CudaContext>> retain(int ordinal);
  ~CudaContext();
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  int ordinal() const { return ordinal_; }

  // Calls `call`, which returns a cudaError_t, with this GPU as the thread's current one.
  template <class Call>
  Status run(const std::string& doing, const Call& call) const {
    const Current current(*this);
    return cuda_status(ordinal_, current.error() != 0 ? current.error() : static_cast<int>(call()), doing);
  }

  // This GPU is the thread's current one while there is one of these.
  class Current {
   public:
    explicit Current(const CudaContext& context);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    int error() const { return error_; }  // why it is not, a cudaError_t; 0: it is

   private:
    int error_;
  };

 private:
  CudaContext(int ordinal, int device, CUctx_st* context) : ordinal_(ordinal), device_(device), context_(context) {}
  int ordinal_;
  int device_;  // the driver's name for it
  CUctx_st* context_;
};

}  // namespace reshard
