// SPDX-License-Identifier: Apache-2.0
#include "lib/device/cuda/cuda_device.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "lib/base/text.h"
#include "lib/device/budget.h"
#include "lib/device/cuda/context.h"
#include "lib/device/cuda/cufile.h"
#include "lib/device/cuda/launch.h"
#include "lib/device/cuda/pinned.h"

namespace reshard {
namespace {

constexpr int kLeastCapability = 8;  // the lowest that kernels are compiled for (CMakeLists.txt)

using ContextPtr = std::shared_ptr<const CudaContext>;

// Device memory, freed by the destructor.
class GpuMemory {
 public:
  GpuMemory() = default;
  static Result<GpuMemory> get(const ContextPtr& context, Index bytes) {
    GpuMemory out;
    if (bytes == 0) return out;
    void* p = nullptr;
    std::size_t free = 0, total = 0;
    bool known = false;
    Status done = context->run("allocating " + human_bytes(bytes) + " of device memory", [&] {
      const cudaError_t code = cudaMalloc(&p, bytes);
      if (code != cudaSuccess) known = cudaMemGetInfo(&free, &total) == cudaSuccess;
      return code;
    });
    if (!done && known)
      return io_error(done.error().message() + "; " + human_bytes(free) + " of " + human_bytes(total) + " is free");
    TRY(std::move(done));
    out.context_ = context;
    out.bytes_ = {static_cast<std::byte*>(p), static_cast<std::size_t>(bytes)};
    return out;
  }
  GpuMemory(GpuMemory&& other) noexcept
      : context_(std::move(other.context_)), bytes_(std::exchange(other.bytes_, {})) {}
  GpuMemory& operator=(GpuMemory&& other) noexcept {
    std::swap(context_, other.context_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~GpuMemory() {
    if (!bytes_.empty())
      static_cast<void>(context_->run("freeing device memory", [&] { return cudaFree(bytes_.data()); }));
  }
  MutableBytes bytes() const { return bytes_; }

 private:
  ContextPtr context_;
  MutableBytes bytes_;
};

class CudaMemory : public Device::Memory {
 public:
  CudaMemory(std::shared_ptr<Budget> budget, PinnedPool::Piece host, GpuMemory device)
      : budget_(std::move(budget)), host_(std::move(host)), device_(std::move(device)) {}
  ~CudaMemory() override { budget_->give(std::ssize(device_.bytes())); }
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;

  DeviceBuffer buffer() const override { return {host_.bytes(), device_.bytes()}; }

 private:
  std::shared_ptr<Budget> budget_;
  PinnedPool::Piece host_;
  GpuMemory device_;
};

// Returns cuFile's functions, or null if it cannot be used. Loads the library once; it is never unloaded.
const cufile::Functions* cufile_functions() {
  static const Result<cufile::Functions> loaded = load_cufile(kCuFileLibrary, kCuFileNeeds);
  return loaded ? &*loaded : nullptr;
}

// Digest results: slots of kSlotBytes in the stream's result memory, to which kernels add.
constexpr Index kSlots = 256;
constexpr Index kSlotBytes = sizeof(Digest);

class CudaStream : public Stream {
 public:
  // `files` is null without cuFile.
  static Result<std::unique_ptr<Stream>> make(ContextPtr context, int multiprocessors, PinnedPool& pinned,
                                              std::shared_ptr<CuFileReader> files) {
    std::unique_ptr<CudaStream> out(new CudaStream(std::move(context), std::move(files)));
    out->place_.multiprocessors = multiprocessors;
    out->host_results_ = TRY(pinned.take(kSlots * kSlotBytes));
    out->results_ = TRY(GpuMemory::get(out->context_, kSlots * kSlotBytes));
    TRY(out->run("creating a stream",
                 [&] { return cudaStreamCreateWithFlags(&out->place_.stream, cudaStreamNonBlocking); }));
    // A blocking wait leaves the processor to the threads that do file I/O.
    TRY(out->run("creating an event", [&] {
      return cudaEventCreateWithFlags(&out->done_, cudaEventBlockingSync | cudaEventDisableTiming);
    }));
    TRY(out->clear_results(kSlots));
    return std::unique_ptr<Stream>(std::move(out));
  }
  ~CudaStream() override {
    static_cast<void>(run("parting", [&] {
      if (place_.stream) static_cast<void>(cudaStreamSynchronize(place_.stream));
      if (done_) static_cast<void>(cudaEventDestroy(done_));
      return place_.stream ? cudaStreamDestroy(place_.stream) : cudaSuccess;
    }));
  }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  Status upload(const DeviceBuffer& buffer, Index bytes) override {
    return move(buffer.device.data(), buffer.host.data(), bytes, cudaMemcpyHostToDevice, " to the device");
  }
  Status download(const DeviceBuffer& buffer, Index bytes) override {
    return move(buffer.host.data(), buffer.device.data(), bytes, cudaMemcpyDeviceToHost, " from the device");
  }

  bool reads_files() const override { return files_ != nullptr; }
  Result<bool> read_file(const std::shared_ptr<const File>& file, Index offset, MutableBytes to) override {
    if (!files_) return false;
    const CudaContext::Current current(*context_);
    return files_->read(file, offset, to);
  }

  Status copy_box(const Dims& shape, Index element_bytes, const std::byte* from, const Dims& from_strides,
                  std::byte* to, const Dims& to_strides) override {
    const CopyShape simple = simplify_copy(shape, element_bytes, from_strides, to_strides);
    if (simple.unit == 0) return {};
    if (simple.loops == 0) return move(to, from, simple.unit, cudaMemcpyDeviceToDevice, " within the device");
    return run("copying a box", [&] { return launch_copy(place_, simple, from, to); });
  }

  Status convert(DType from, DType to, const std::byte* in, std::byte* out, Index n) override {
    if (from == to) return move(out, in, n * byte_size(from), cudaMemcpyDeviceToDevice, " within the device");
    return run("converting elements", [&] { return launch_convert(place_, from, to, in, out, n); });
  }

  Status digest_box(const Dims& tensor_shape, const Box& box, Index element_bytes, const std::byte* data,
                    Digest* out) override {
    *out = {};
    if (box.empty()) return {};
    if (std::ssize(pending_) == kSlots) TRY(wait());
    auto* slot = reinterpret_cast<std::uint32_t*>(results_.bytes().data() + bytes_of(pending_.size()));
    TRY(run("digesting a box", [&] { return launch_digest(place_, tensor_shape, box, element_bytes, data, slot); }));
    pending_.push_back(out);
    return {};
  }

  Status wait() override {
    const std::vector<Digest*> pending = std::exchange(pending_, {});
    if (!pending.empty()) {
      TRY(move(host_results_.bytes().data(), results_.bytes().data(), bytes_of(pending.size()), cudaMemcpyDeviceToHost,
               " of digests"));
      TRY(clear_results(std::ssize(pending)));
    }
    TRY(run("waiting for the device", [&] {
      const cudaError_t code = cudaEventRecord(done_, place_.stream);
      return code == cudaSuccess ? cudaEventSynchronize(done_) : code;
    }));
    for (std::size_t i = 0; i < pending.size(); ++i)
      std::memcpy(pending[i]->words.data(), host_results_.bytes().data() + bytes_of(i), sizeof(pending[i]->words));
    return {};
  }

 private:
  CudaStream(ContextPtr context, std::shared_ptr<CuFileReader> files)
      : context_(std::move(context)), files_(std::move(files)) {}

  static Index bytes_of(std::size_t slots) { return static_cast<Index>(slots) * kSlotBytes; }

  template <class Call>
  Status run(const std::string& doing, const Call& call) const {
    return context_->run(doing, call);
  }

  Status move(void* to, const void* from, Index bytes, cudaMemcpyKind kind, const char* what) {
    if (bytes == 0) return {};
    return run("copying " + human_bytes(bytes) + what,
               [&] { return cudaMemcpyAsync(to, from, bytes, kind, place_.stream); });
  }

  // Zeroes the slots that were fetched, because kernels add to them.
  Status clear_results(Index slots) {
    return run("clearing digests",
               [&] { return cudaMemsetAsync(results_.bytes().data(), 0, slots * kSlotBytes, place_.stream); });
  }

  ContextPtr context_;
  std::shared_ptr<CuFileReader> files_;
  LaunchPlace place_;
  PinnedPool::Piece host_results_;
  GpuMemory results_;
  cudaEvent_t done_ = nullptr;
  std::vector<Digest*> pending_;  // destinations of the slots in use
};

class CudaDevice : public Device {
 public:
  CudaDevice(ContextPtr context, std::string name, int multiprocessors, Index memory_cap)
      : context_(std::move(context)),
        name_(std::move(name)),
        multiprocessors_(multiprocessors),
        budget_(std::make_shared<Budget>(name_, memory_cap)),
        pinned_(std::make_shared<PinnedPool>(context_)) {}

  std::string_view name() const override { return name_; }
  bool is_cpu() const override { return false; }
  int ordinal() const override { return context_->ordinal(); }
  // Below this size, launching transfers and kernels takes as long as running them.
  Index slab_bytes() const override { return Index{8} << 20; }

  Result<std::unique_ptr<Memory>> allocate(Index bytes, Sides sides) override {
    if (bytes < 0) return internal_error(name_ + ": memory: expected a size, got " + std::to_string(bytes));
    TRY(budget_->take(bytes));
    auto memory = get(bytes, sides);
    if (!memory) budget_->give(bytes);
    return memory;
  }

  Result<std::unique_ptr<Stream>> stream() override {
    return CudaStream::make(context_, multiprocessors_, *pinned_, file_reader());
  }

  Status settle() override {
    return context_->run("waiting for queued work", [] { return cudaDeviceSynchronize(); });
  }

 private:
  Result<std::unique_ptr<Memory>> get(Index bytes, Sides sides) {
    auto device = TRY(GpuMemory::get(context_, bytes));
    auto host = TRY(pinned_->take(sides == Sides::kBoth ? bytes : 0));
    return std::unique_ptr<Memory>(std::make_unique<CudaMemory>(budget_, std::move(host), std::move(device)));
  }

  // Returns the reader that all streams share. It lives only as long as the streams: the device may be kept, but files
  // need not stay open.
  std::shared_ptr<CuFileReader> file_reader() {
    const cufile::Functions* functions = cufile_functions();
    if (!functions) return nullptr;
    const std::lock_guard lock(files_mutex_);
    auto reader = files_.lock();
    if (!reader) files_ = reader = std::make_shared<CuFileReader>(*functions);
    return reader;
  }

  ContextPtr context_;
  std::string name_;
  int multiprocessors_;
  std::shared_ptr<Budget> budget_;
  std::shared_ptr<PinnedPool> pinned_;
  std::mutex files_mutex_;
  std::weak_ptr<CuFileReader> files_;
};

}  // namespace

Result<std::string> cuda_version() {
  TRY(count_cuda_devices());
  const auto text = [](int v) { return std::to_string(v / 1000) + "." + std::to_string(v / 10 % 100); };
  int driver = 0, runtime = 0;
  TRY(cuda_status(0, cudaDriverGetVersion(&driver), "querying the driver's version"));
  TRY(cuda_status(0, cudaRuntimeGetVersion(&runtime), "querying the runtime's version"));
  return "runtime " + text(runtime) + ", driver " + text(driver);
}

Result<int> count_cuda_devices() {
  int driver = 0, count = 0;
  if (cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0)
    return unsupported("cuda: no GPU can be used: this machine has no NVIDIA driver");
  if (const cudaError_t code = cudaGetDeviceCount(&count); code != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return unsupported(std::string("cuda: no GPU can be used: ") + cudaGetErrorString(code));
  }
  if (count == 0) return unsupported("cuda: no GPU can be used: none found");
  return count;
}

Result<std::unique_ptr<Device>> open_cuda_device(int ordinal, Index memory_cap) {
  cudaDeviceProp properties;
  TRY(cuda_status(ordinal, cudaGetDeviceProperties(&properties, ordinal), "querying its properties"));
  const std::string name = "cuda:" + std::to_string(ordinal) + " " + properties.name;
  if (properties.major < kLeastCapability)
    return unsupported(name + ": expected a GPU of compute capability " + std::to_string(kLeastCapability) +
                       ".0 or higher, got " + std::to_string(properties.major) + "." +
                       std::to_string(properties.minor));
  auto context = TRY(CudaContext::retain(ordinal));
  // Loading a kernel at its first launch may wait for all running kernels, one of which may wait for another rank.
  TRY(context->run("loading kernels", [] { return load_kernels(); }));
  return std::unique_ptr<Device>(
      std::make_unique<CudaDevice>(std::move(context), name, properties.multiProcessorCount, memory_cap));
}

}  // namespace reshard
