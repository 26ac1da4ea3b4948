#include "lib/device/cuda/cuda_device.h"

#include <cuda_runtime_api.h>

#include <array>
#include <cstring>
#include <mutex>
#include <utility>

#include "lib/base/text.h"
#include "lib/device/budget.h"
#include "lib/device/cuda/cufile.h"
#include "lib/device/cuda/launch.h"

namespace reshard {
namespace {

// "cuda:0: copying 1.00 MB to the device: out of memory".
Status cuda_status(int ordinal, int code, const std::string& doing) {
  if (code == cudaSuccess) return {};
  return io_error("cuda:" + std::to_string(ordinal) + ": " + doing + ": " +
                  cudaGetErrorString(static_cast<cudaError_t>(code)));
}

// The memory on one side, and how it is given back.
template <cudaError_t (*kFree)(void*)>
class Owned {
 public:
  Owned() = default;
  Owned(void* memory, Index bytes) : bytes_(static_cast<std::byte*>(memory), static_cast<std::size_t>(bytes)) {}
  Owned(Owned&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Owned() {
    if (!bytes_.empty()) static_cast<void>(kFree(bytes_.data()));
  }
  MutableBytes bytes() const { return bytes_; }

 private:
  MutableBytes bytes_;
};
using PinnedMemory = Owned<cudaFreeHost>;
using GpuMemory = Owned<cudaFree>;

Result<PinnedMemory> allocate_pinned(int ordinal, Index bytes) {
  if (bytes == 0) return PinnedMemory();
  void* p = nullptr;
  TRY(cuda_status(ordinal, cudaHostAlloc(&p, static_cast<std::size_t>(bytes), cudaHostAllocPortable),
                  "getting " + human_bytes(bytes) + " of pinned memory"));
  return PinnedMemory(p, bytes);
}

Result<GpuMemory> allocate_on_gpu(int ordinal, Index bytes) {
  if (bytes == 0) return GpuMemory();
  void* p = nullptr;
  const cudaError_t code = cudaMalloc(&p, static_cast<std::size_t>(bytes));
  if (code != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // it would come out of the next launch otherwise
    std::size_t free = 0, total = 0;
    std::string there;
    if (cudaMemGetInfo(&free, &total) == cudaSuccess)
      there = ", of which " + human_bytes(static_cast<Index>(free)) + " of " + human_bytes(static_cast<Index>(total)) +
              " are free";
    return cuda_status(ordinal, code, "getting " + human_bytes(bytes) + " of device memory" + there).error();
  }
  return GpuMemory(p, bytes);
}

class CudaMemory : public Device::Memory {
 public:
  CudaMemory(std::shared_ptr<Budget> budget, PinnedMemory host, GpuMemory device)
      : budget_(std::move(budget)), host_(std::move(host)), device_(std::move(device)) {}
  ~CudaMemory() override { budget_->give(static_cast<Index>(device_.bytes().size())); }
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;

  DeviceBuffer buffer() const override { return {host_.bytes(), device_.bytes()}; }

 private:
  std::shared_ptr<Budget> budget_;
  PinnedMemory host_;
  GpuMemory device_;
};

// cuFile's functions, or null where it cannot be used. Loaded once, and never unloaded.
const cufile::Functions* cufile_functions() {
  static const Result<cufile::Functions> loaded = load_cufile(kCuFileLibrary, kCuFileNeeds);
  return loaded ? &*loaded : nullptr;
}

// The results of digests that kernels are adding up: slots of kSlotBytes in the stream's result memory.
constexpr Index kSlots = 256;
constexpr Index kSlotBytes = sizeof(Digest);

class CudaStream : public Stream {
 public:
  // `files` is null where there is no cuFile.
  CudaStream(int ordinal, LaunchPlace place, PinnedMemory host_results, GpuMemory results,
             std::shared_ptr<CuFileReader> files)
      : ordinal_(ordinal),
        place_(place),
        host_results_(std::move(host_results)),
        results_(std::move(results)),
        files_(std::move(files)) {
    pending_.reserve(kSlots);
  }
  ~CudaStream() override {
    static_cast<void>(cudaStreamSynchronize(place_.stream));
    static_cast<void>(cudaStreamDestroy(place_.stream));
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
    TRY(use_device());
    return files_->read(file, offset, to);
  }

  Status copy_box(const Dims& shape, Index element_bytes, const std::byte* from, const Dims& from_strides,
                  std::byte* to, const Dims& to_strides) override {
    const CopyShape simple = simplify_copy(shape, element_bytes, from_strides, to_strides);
    if (simple.unit == 0) return {};
    if (simple.loops == 0) return move(to, from, simple.unit, cudaMemcpyDeviceToDevice, " within the device");
    TRY(use_device());
    return status(launch_copy(place_, simple, from, to), "copying a box");
  }

  Status convert(DType from, DType to, const std::byte* in, std::byte* out, Index n) override {
    if (from == to) return move(out, in, n * byte_size(from), cudaMemcpyDeviceToDevice, " within the device");
    TRY(use_device());
    return status(launch_convert(place_, from, to, in, out, n), "converting elements");
  }

  Status digest_box(const Dims& tensor_shape, const Box& box, Index element_bytes, const std::byte* data,
                    Digest* out) override {
    *out = {};
    if (box.empty()) return {};
    std::byte* slot = TRY(new_slot());
    auto* words = reinterpret_cast<std::uint32_t*>(slot);
    TRY(status(launch_digest(place_, tensor_shape, box, element_bytes, data, words), "digesting a box"));
    return fetch_slot(out);
  }

  Status wait() override {
    TRY(use_device());
    TRY(status(cudaStreamSynchronize(place_.stream), "waiting for the device"));
    for (std::size_t i = 0; i < pending_.size(); ++i)
      std::memcpy(pending_[i]->words.data(), host_results_.bytes().data() + offset_of(i), sizeof(pending_[i]->words));
    pending_.clear();
    return {};
  }

 private:
  static Index offset_of(std::size_t slot) { return static_cast<Index>(slot) * kSlotBytes; }

  Status status(int code, const std::string& doing) const { return cuda_status(ordinal_, code, doing); }
  // The current device is each thread's own.
  Status use_device() const { return status(cudaSetDevice(ordinal_), "choosing the device"); }

  Status move(void* to, const void* from, Index bytes, cudaMemcpyKind kind, const char* where) {
    if (bytes == 0) return {};
    TRY(use_device());
    return status(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), kind, place_.stream),
                  "copying " + human_bytes(bytes) + where);
  }

  // The next slot on the device, zeroed.
  Result<std::byte*> new_slot() {
    if (static_cast<Index>(pending_.size()) == kSlots) TRY(wait());
    TRY(use_device());
    std::byte* slot = results_.bytes().data() + offset_of(pending_.size());
    TRY(status(cudaMemsetAsync(slot, 0, kSlotBytes, place_.stream), "clearing a result"));
    return slot;
  }
  Status fetch_slot(Digest* out) {
    const Index at = offset_of(pending_.size());
    TRY(status(cudaMemcpyAsync(host_results_.bytes().data() + at, results_.bytes().data() + at, kSlotBytes,
                               cudaMemcpyDeviceToHost, place_.stream),
               "fetching a result"));
    pending_.push_back(out);
    return {};
  }

  int ordinal_;
  LaunchPlace place_;
  PinnedMemory host_results_;
  GpuMemory results_;
  std::shared_ptr<CuFileReader> files_;
  std::vector<Digest*> pending_;  // where the slots in use go
};

class CudaDevice : public Device {
 public:
  CudaDevice(int ordinal, std::string name, int multiprocessors, Index memory_cap)
      : ordinal_(ordinal),
        name_(std::move(name)),
        multiprocessors_(multiprocessors),
        budget_(std::make_shared<Budget>(name_, memory_cap)) {}

  std::string_view name() const override { return name_; }
  bool is_cpu() const override { return false; }
  int ordinal() const override { return ordinal_; }

  Result<std::unique_ptr<Memory>> allocate(Index bytes) override {
    if (bytes < 0) return internal_error(name_ + ": memory: expected a size, got " + std::to_string(bytes));
    TRY(cuda_status(ordinal_, cudaSetDevice(ordinal_), "choosing the device"));
    TRY(budget_->take(bytes));
    auto memory = allocate_both(bytes);
    if (!memory) budget_->give(bytes);
    return memory;
  }

  Result<std::unique_ptr<Stream>> stream() override {
    TRY(cuda_status(ordinal_, cudaSetDevice(ordinal_), "choosing the device"));
    auto host_results = TRY(allocate_pinned(ordinal_, kSlots * kSlotBytes));
    auto results = TRY(allocate_on_gpu(ordinal_, kSlots * kSlotBytes));
    cudaStream_t stream = nullptr;
    TRY(cuda_status(ordinal_, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream"));
    return std::unique_ptr<Stream>(std::make_unique<CudaStream>(
        ordinal_, LaunchPlace{stream, multiprocessors_}, std::move(host_results), std::move(results), file_reader()));
  }

 private:
  Result<std::unique_ptr<Memory>> allocate_both(Index bytes) {
    auto device = TRY(allocate_on_gpu(ordinal_, bytes));
    auto host = TRY(allocate_pinned(ordinal_, bytes));
    return std::unique_ptr<Memory>(std::make_unique<CudaMemory>(budget_, std::move(host), std::move(device)));
  }

  // One for all streams, and no longer than there are any: a device may be kept, the files that were read on it not.
  std::shared_ptr<CuFileReader> file_reader() {
    const cufile::Functions* functions = cufile_functions();
    if (!functions) return nullptr;
    const std::lock_guard lock(files_mutex_);
    auto reader = files_.lock();
    if (!reader) files_ = reader = std::make_shared<CuFileReader>(*functions);
    return reader;
  }

  int ordinal_;
  std::string name_;
  int multiprocessors_;
  std::shared_ptr<Budget> budget_;
  std::mutex files_mutex_;
  std::weak_ptr<CuFileReader> files_;
};

}  // namespace

Result<int> count_cuda_devices() {
  int driver = 0, count = 0;
  if (cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0)
    return unsupported("cuda: no GPU can be used: this machine has no driver of NVIDIA's");
  if (const cudaError_t code = cudaGetDeviceCount(&count); code != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return unsupported(std::string("cuda: no GPU can be used: ") + cudaGetErrorString(code));
  }
  if (count == 0) return unsupported("cuda: no GPU can be used: there is none");
  return count;
}

Result<std::unique_ptr<Device>> open_cuda_device(int ordinal, Index memory_cap) {
  TRY(cuda_status(ordinal, cudaSetDevice(ordinal), "choosing the device"));
  // Whoever waits for the GPU leaves the processor to the threads that read and write files.
  TRY(cuda_status(ordinal, cudaSetDeviceFlags(cudaDeviceScheduleBlockingSync), "setting how to wait"));
  cudaDeviceProp properties;
  TRY(cuda_status(ordinal, cudaGetDeviceProperties(&properties, ordinal), "asking what it is"));
  const std::string name = "cuda:" + std::to_string(ordinal) + " " + properties.name;
  return std::unique_ptr<Device>(
      std::make_unique<CudaDevice>(ordinal, name, properties.multiProcessorCount, memory_cap));
}

}  // namespace reshard
