// SPDX-License-Identifier: Apache-2.0
// Devices: where elements are copied between strides, converted and digested.
//
// A Device allocates memory and creates Streams that work in it. The CPU defines the results: its streams do everything
// immediately in the caller's thread, and its device memory is host memory, so nothing is uploaded or downloaded. A
// GPU's stream queues work and returns; wait() waits for it. A stream may be used by one thread only. The engine has a
// stream per thread, so that one thread's transfers and kernels overlap with another's disk I/O.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/cursor.h"
#include "lib/base/file.h"
#include "lib/base/result.h"
#include "lib/device/digest.h"
#include "lib/layout/box.h"
#include "lib/layout/dtype.h"

namespace reshard {

// Memory of one device. `host` is used for file I/O (page-aligned, and pinned for a GPU); `device` is what streams work
// on. On the CPU both are the same bytes. If only device memory was allocated on a GPU, `host` is empty.
struct DeviceBuffer {
  MutableBytes host;
  MutableBytes device;

  DeviceBuffer part(Index offset, Index bytes) const {
    const auto begin = static_cast<std::size_t>(offset), n = static_cast<std::size_t>(bytes);
    return {host.subspan(begin, n), device.subspan(begin, n)};
  }
};

class Stream {
 public:
  virtual ~Stream() = default;

  // Copy the first `bytes` of a buffer to the device, or to the host.
  virtual Status upload(const DeviceBuffer& buffer, Index bytes) = 0;
  virtual Status download(const DeviceBuffer& buffer, Index bytes) = 0;

  // Returns whether read_file() may work: a GPU on a machine whose drives or network cards write into GPU memory.
  virtual bool reads_files() const { return false; }
  // Fills all of `to`, in device memory, from `offset` of the file. Synchronous and outside the stream's queue: the
  // data is there when it returns, and no queued work may use `to`. Returns false if this file cannot be read that way;
  // the contents of `to` are then undefined, and the caller should read into host memory and upload.
  virtual Result<bool> read_file(const std::shared_ptr<const File>&, Index /*offset*/, MutableBytes /*to*/) {
    return false;
  }

  // These take device memory and do what the functions of the same names do (copy.h, convert.h, digest.h).
  virtual Status copy_box(const Dims& shape, Index element_bytes, const std::byte* from, const Dims& from_strides,
                          std::byte* to, const Dims& to_strides) = 0;
  virtual Status convert(DType from, DType to, const std::byte* in, std::byte* out, Index n) = 0;
  // `*out` is written by the time wait() returns and must stay valid until then. Several digests may be queued.
  virtual Status digest_box(const Dims& tensor_shape, const Box& box, Index element_bytes, const std::byte* data,
                            Digest* out) = 0;

  // Waits for all queued work and returns its first error, if none was returned before.
  virtual Status wait() = 0;
};

// Which sides of a DeviceBuffer to allocate.
enum class Sides { kBoth, kDevice };

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string_view name() const = 0;  // "cpu", "cuda:0 NVIDIA H200"
  virtual bool is_cpu() const = 0;
  virtual int ordinal() const { return -1; }  // of a GPU, as numbered by CUDA

  // Returns the number of bytes that are best processed at once.
  virtual Index slab_bytes() const { return Index{1} << 20; }

  // Allocates `bytes` bytes on each of `sides`, freed with the returned owner. The contents are undefined. Fails,
  // saying how much is available, if the device has less or its cap would be exceeded.
  class Memory {
   public:
    virtual ~Memory() = default;
    virtual DeviceBuffer buffer() const = 0;
  };
  virtual Result<std::unique_ptr<Memory>> allocate(Index bytes, Sides sides = Sides::kBoth) = 0;

  virtual Result<std::unique_ptr<Stream>> stream() = 0;

  // Waits for all work that this process has queued on the device, by any stream. Streams of one device do not wait for
  // each other.
  virtual Status settle() { return {}; }
};

// Returns the CPU device without a cap.
Device& cpu_device();

// Opens the device that the user named: "cpu"; "cuda" or "cuda:1", with an error that says why if it cannot be used; or
// "auto", a GPU if there is one and this program supports it, else the CPU. `memory_cap` limits its allocations in
// bytes, 0 for no limit. If the name leaves the GPU open, the ranks of a machine take turns: `local_rank` is this
// rank's index there (job.h).
Result<std::unique_ptr<Device>> open_device(const std::string& name, Index memory_cap, int local_rank = 0);

}  // namespace reshard
