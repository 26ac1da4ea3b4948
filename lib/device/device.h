// Where elements are worked on: copied between strides, converted, digested.
//
// A Device gives memory, and Streams that work in it. The CPU is the definition: its streams do everything at once, in
// the caller's thread, and its device memory is the host's own, so that nothing is uploaded or downloaded. A stream of
// a GPU queues work and returns; wait() ends it. One stream serves one thread; the engine has a stream a thread, so
// that one thread's transfers and kernels run while another waits for the disk.
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

// Memory of one device, on both sides or on its own only (then `host` is empty, but on the CPU): `host` is what files
// are read into and written from (page-aligned; pinned for a GPU), `device` what streams work on. On the CPU both are
// the same bytes.
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

  // Bring the first `bytes` of a buffer to the device's side, or to the host's.
  virtual Status upload(const DeviceBuffer& buffer, Index bytes) = 0;
  virtual Status download(const DeviceBuffer& buffer, Index bytes) = 0;

  // Whether read_file() may work: a GPU on a machine whose drives or network cards write into its memory.
  virtual bool reads_files() const { return false; }
  // Fills all of `to`, in device memory, from `offset` of the file on. Waits for nothing and has no place in the queue:
  // `to` is there when it returns, and nothing queued may use it. False where this file cannot be read that way; then
  // `to` may hold anything, and it is for the caller to read the file into host memory and upload.
  virtual Result<bool> read_file(const std::shared_ptr<const File>&, Index /*offset*/, MutableBytes /*to*/) {
    return false;
  }

  // The rest takes device memory, and means what the functions of these names mean (copy.h, convert.h, digest.h).
  virtual Status copy_box(const Dims& shape, Index element_bytes, const std::byte* from, const Dims& from_strides,
                          std::byte* to, const Dims& to_strides) = 0;
  virtual Status convert(DType from, DType to, const std::byte* in, std::byte* out, Index n) = 0;
  // `out` is the caller's until wait() has returned, and valid after it; several may be queued.
  virtual Status digest_box(const Dims& tensor_shape, const Box& box, Index element_bytes, const std::byte* data,
                            Digest* out) = 0;

  // Returns when everything queued is done; an error of any of it comes out here at the latest.
  virtual Status wait() = 0;
};

// Which sides memory has.
enum class Sides { kBoth, kDevice };

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string_view name() const = 0;  // "cpu", "cuda:0 NVIDIA H200"
  virtual bool is_cpu() const = 0;
  virtual int ordinal() const { return -1; }  // of a GPU, as CUDA counts them
  // What its driver took of the process's memory, for itself, when the device was opened.
  virtual Index host_bytes() const { return 0; }

  // How many bytes are best worked on at once.
  virtual Index slab_bytes() const { return Index{1} << 20; }

  // Memory of `bytes` bytes on each of these sides, freed with the returned owner; it holds anything. An error that
  // says how much there is when the device has less, or when its cap would be passed.
  class Memory {
   public:
    virtual ~Memory() = default;
    virtual DeviceBuffer buffer() const = 0;
  };
  virtual Result<std::unique_ptr<Memory>> allocate(Index bytes, Sides sides = Sides::kBoth) = 0;

  virtual Result<std::unique_ptr<Stream>> stream() = 0;

  // Returns when all that this process has queued on the device is done, by whatever stream: streams of a device wait
  // for nobody else's.
  virtual Status settle() { return {}; }
};

// The CPU.
Device& cpu_device();

// How the user says which device: "cpu"; "cuda" or "cuda:1", an error that says why when there is none; "auto": a GPU
// where there is one and this program was built for it, else the CPU. `memory_cap`: bytes it may take at most; 0: what
// it has. Where the name leaves open which, the ranks of a machine take turns: `local_rank` is this one's number there
// (job.h).
Result<std::unique_ptr<Device>> open_device(const std::string& name, Index memory_cap, int local_rank = 0);

}  // namespace reshard
